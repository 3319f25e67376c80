"""Which decoder layers each pipeline stage holds: Megatron's rules as plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from megatron_rl.config.megatron import MegatronConfig


@dataclass(frozen=True)
class StagePlan:
    """How `num_layers` are split over `pp_size` stages; raises ValueError with the numbers if they cannot be.

    vpp_size: model chunks per stage (virtual pipeline); stage s holds every pp_size-th chunk from the s-th on.
    first, last: layers of the first and the last stage; None: an equal share of the remaining layers. counts_embedding,
    counts_loss: the embedding, or the loss, counts as a layer, so that the first chunk, or the last, has one less.
    """

    num_layers: int
    pp_size: int
    vpp_size: int = 1
    first: int | None = None
    last: int | None = None
    counts_embedding: bool = False
    counts_loss: bool = False

    @classmethod
    def from_config(cls, num_layers: int, megatron: MegatronConfig) -> StagePlan:
        """The stages of a model of `num_layers` layers under a role's configuration."""
        return cls(
            num_layers,
            megatron.pipeline_model_parallel_size,
            megatron.virtual_pipeline_model_parallel_size or 1,
            megatron.num_layers_in_first_pipeline_stage,
            megatron.num_layers_in_last_pipeline_stage,
            megatron.account_for_embedding_in_pipeline_split,
            megatron.account_for_loss_in_pipeline_split,
        )

    def __post_init__(self) -> None:
        uneven = f"first({self.first}) and last({self.last})"
        given = [layers for layers in (self.first, self.last) if layers is not None]
        if given and (self.vpp_size > 1 or self.pp_size == 1):
            raise ValueError(f"{uneven} layers need pp({self.pp_size}) > 1 and vpp({self.vpp_size}) = 1")
        if self.vpp_size > 1 and self.pp_size == 1:
            raise ValueError(f"vpp({self.vpp_size}) needs pp({self.pp_size}) > 1")
        if counted := self._counted:
            self._check_counted(counted, given)
            return
        left, num_open = self.num_layers - sum(given), (self.pp_size - len(given)) * self.vpp_size
        # As in Megatron no stage is empty.
        fits = (left % num_open == 0 and left >= num_open) if num_open else left == 0
        if fits and min([self.pp_size, self.vpp_size, *given]) >= 1:
            return
        if given:
            rule = f"leave equal shares of num_hidden_layers({self.num_layers}) to the other {num_open} stages"
            if num_open == 0:
                rule = f"add up to num_hidden_layers({self.num_layers})"
            raise ValueError(f"{uneven} layers of pp({self.pp_size}) stages must {rule}")
        sizes = f"pp({self.pp_size})" + (f" * vpp({self.vpp_size})" if self.vpp_size > 1 else "")
        raise ValueError(f"{sizes} must divide num_hidden_layers({self.num_layers})")

    @property
    def _counted(self) -> tuple[str, ...]:
        """The names of the parts that count as a layer."""
        parts = (("embedding", self.counts_embedding), ("loss", self.counts_loss))
        return tuple(name for name, counts in parts if counts)

    def _check_counted(self, counted: tuple[str, ...], given: list[int]) -> None:
        """Raise ValueError if layers and counted parts do not make equal chunks, none of which is empty."""
        what = f"{' and '.join(counted)} counted as layers"
        if given:
            raise ValueError(f"{what} need first({self.first}) and last({self.last}) layers to be open")
        sizes = f"pp({self.pp_size})" + (f" * vpp({self.vpp_size})" if self.vpp_size > 1 else "")
        total, num_chunks = self.num_layers + len(counted), self.pp_size * self.vpp_size
        if self.pp_size == 1:
            raise ValueError(f"{what} need pp({self.pp_size}) > 1")
        counts = f"num_hidden_layers({self.num_layers}) + {len(counted)}"
        if total % num_chunks:
            raise ValueError(f"{what}: {sizes} must divide {counts}")
        if total < 2 * num_chunks:  # a chunk could have a counted part and no layer
            raise ValueError(
                f"{what}: {counts} must be at least 2 for each chunk, and {sizes} makes {num_chunks} chunks"
            )

    def layers(self, pp_rank: int) -> list[range]:
        """Layer numbers of each chunk of a stage, counted over the whole model."""
        sizes = self._sizes()
        numbers = range(pp_rank, len(sizes), self.pp_size)
        starts = [sum(sizes[:number]) for number in numbers]
        return [range(start, start + sizes[number]) for start, number in zip(starts, numbers, strict=True)]

    @property
    def chunk_sizes(self) -> tuple[tuple[int, ...], ...]:
        """The number of layers of each chunk of each stage."""
        return _chunk_sizes(self)

    def _sizes(self) -> list[int]:
        """The number of layers of each chunk, in the order of the layers."""
        if counted := self._counted:
            num_chunks = self.pp_size * self.vpp_size
            equal = [(self.num_layers + len(counted)) // num_chunks] * num_chunks
            equal[0] -= self.counts_embedding
            equal[-1] -= self.counts_loss
            return equal
        sizes: list[int | None] = [None] * (self.pp_size * self.vpp_size)
        if self.first is not None:
            sizes[0] = self.first
        if self.last is not None:
            sizes[-1] = self.last
        open_stages = sizes.count(None)
        left = self.num_layers - sum(size for size in sizes if size is not None)
        return [left // open_stages if size is None else size for size in sizes]


@cache
def _chunk_sizes(plan: StagePlan) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(len, plan.layers(pp_rank))) for pp_rank in range(plan.pp_size))
