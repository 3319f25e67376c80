"""Which decoder layers each pipeline stage holds: Megatron's rules as plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from megatron_rl.config.megatron import MegatronConfig


@dataclass(frozen=True)
class StagePlan:
    """How `num_layers` are split over `pp_size` stages; raises ValueError with the numbers if they cannot be.

    vpp_size: model chunks per stage (virtual pipeline); stage s holds every pp_size-th chunk from the s-th on.
    first, last: layers of the first and the last stage; None: an equal share of the remaining layers.
    """

    num_layers: int
    pp_size: int
    vpp_size: int = 1
    first: int | None = None
    last: int | None = None

    @classmethod
    def from_config(cls, num_layers: int, megatron: MegatronConfig) -> StagePlan:
        """The stages of a model of `num_layers` layers under a role's configuration."""
        return cls(
            num_layers,
            megatron.pipeline_model_parallel_size,
            megatron.virtual_pipeline_model_parallel_size or 1,
            megatron.num_layers_in_first_pipeline_stage,
            megatron.num_layers_in_last_pipeline_stage,
        )

    def __post_init__(self) -> None:
        uneven = f"first({self.first}) and last({self.last})"
        given = [layers for layers in (self.first, self.last) if layers is not None]
        if given and (self.vpp_size > 1 or self.pp_size == 1):
            raise ValueError(f"{uneven} layers need pp({self.pp_size}) > 1 and vpp({self.vpp_size}) = 1")
        if self.vpp_size > 1 and self.pp_size == 1:
            raise ValueError(f"vpp({self.vpp_size}) needs pp({self.pp_size}) > 1")
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

    def layers(self, pp_rank: int) -> list[range]:
        """Layer numbers of each chunk of a stage, counted over the whole model."""
        sizes = self._stage_sizes()
        if self.vpp_size == 1:
            start = sum(sizes[:pp_rank])
            return [range(start, start + sizes[pp_rank])]
        size = sizes[0] // self.vpp_size
        starts = [(chunk * self.pp_size + pp_rank) * size for chunk in range(self.vpp_size)]
        return [range(start, start + size) for start in starts]

    @property
    def chunk_sizes(self) -> tuple[tuple[int, ...], ...]:
        """The number of layers of each chunk of each stage."""
        return _chunk_sizes(self)

    def _stage_sizes(self) -> list[int]:
        sizes: list[int | None] = [None] * self.pp_size
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
