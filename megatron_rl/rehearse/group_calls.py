"""A collective, or a batch of sends and receives, as a rehearsed rank called it. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

SEND, RECEIVE = "send", "recv"


@dataclass(frozen=True)
class Size:
    """A tensor of a call: elements, torch's dtype, kind of its device."""

    numel: int
    dtype: str
    device: str

    def __str__(self) -> str:
        return f"{self.numel} {self.dtype} on {self.device}"

    @classmethod
    def of(cls, shape: Sequence[int], dtype: str, device: str) -> Size:
        """Return the size of a tensor of this shape."""
        return cls(math.prod(shape), dtype, device)


@dataclass(frozen=True)
class GroupCall:
    """One operation of one rank.

    name: torch's, without its namespace. group: numbers of the process group's ranks over all pools, in its order; ():
    all that there are. sizes: of its tensors. root: the rank that a broadcast comes from, within the group; None of
    others. peer: number over all pools of the other side of a send or receive; None of collectives. batch: number
    shared by the sends and receives that are posted at once; None: alone. phase: of the step. line: file and number of
    the innermost line of this project or of Megatron. reduction: SUM, MAX and so on; "" of what reduces nothing.
    purpose: description that torch has of the group, such as Megatron's TENSOR_MODEL_PARALLEL_GROUP; "": it has none.
    """

    phase: str
    name: str
    group: tuple[int, ...]
    sizes: tuple[Size, ...]
    line: str
    root: int | None = None
    peer: int | None = None
    batch: int | None = None
    reduction: str = ""
    purpose: str = ""

    @property
    def is_message(self) -> bool:
        """Whether it is a send or a receive."""
        return self.peer is not None

    def __str__(self) -> str:
        sizes = " and ".join(map(str, self.sizes)) or "nothing"
        reduction = f" {self.reduction}" * (self.reduction not in ("", "SUM"))
        return f"{self.name}{reduction} of {sizes} at {self.line}"

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GroupCall:
        """Return what `as_json` made."""
        sizes = tuple(Size(**size) for size in data["sizes"])
        return cls(**data | {"sizes": sizes, "group": tuple(data["group"])})
