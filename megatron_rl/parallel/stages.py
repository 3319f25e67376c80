"""Which decoder layers each pipeline stage holds: Megatron's rules as plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StagePlan:
    """How `num_layers` are laid over `pp_size` stages; raises ValueError, naming the numbers, when they cannot be.

    vpp_size: model chunks per stage (virtual pipeline); stage s holds every pp_size-th chunk from the s-th on.
    first, last: layers of the first and of the last stage; None: an equal share of what the others leave.
    """

    num_layers: int
    pp_size: int
    vpp_size: int = 1
    first: int | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        uneven = self.first is not None or self.last is not None
        if uneven and (self.vpp_size > 1 or self.pp_size == 1):
            raise ValueError(f"uneven stages need pp({self.pp_size}) > 1 and vpp({self.vpp_size}) = 1")
        if self.vpp_size > 1 and self.pp_size == 1:
            raise ValueError(f"vpp({self.vpp_size}) needs pp > 1")
        given = [layers for layers in (self.first, self.last) if layers is not None]
        left, num_even = self.num_layers - sum(given), (self.pp_size - len(given)) * self.vpp_size
        if min([*given, left]) < 0 or (left % num_even if num_even else left):
            raise ValueError(
                f"{self.num_layers} layers do not spread over pp({self.pp_size}) * vpp({self.vpp_size})"
                + (f" with first({self.first}) and last({self.last})" if uneven else "")
            )

    def layers(self, pp_rank: int) -> list[range]:
        """Layer numbers of each chunk of a stage, counted over the whole model."""
        sizes = self._stage_sizes()
        if self.vpp_size == 1:
            start = sum(sizes[:pp_rank])
            return [range(start, start + sizes[pp_rank])]
        size = sizes[0] // self.vpp_size
        starts = [(chunk * self.pp_size + pp_rank) * size for chunk in range(self.vpp_size)]
        return [range(start, start + size) for start in starts]

    def _stage_sizes(self) -> list[int]:
        sizes: list[int | None] = [None] * self.pp_size
        if self.first is not None:
            sizes[0] = self.first
        if self.last is not None:
            sizes[-1] = self.last
        open_stages = sizes.count(None)
        left = self.num_layers - sum(size for size in sizes if size is not None)
        return [left // open_stages if size is None else size for size in sizes]
