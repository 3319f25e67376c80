"""How the changes of one piece of the weights travel, and how many bytes that takes. No torch.

A piece travels in the smallest of three forms, which follows from the number of its changed elements alone:

| form      | index                                  | values           |
|-----------|----------------------------------------|------------------|
| POSITIONS | int32, the place of each change        | changed elements |
| MASK      | one bit for each element of the piece  | changed elements |
| WHOLE     | none                                   | all elements     |

With bfloat16 positions are smallest up to 3.1% of changed elements, then a mask up to 93.8%.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

POSITION_BYTES = 4
COUNT_BYTES = 4
"""Bytes of a count: all ranks of a weight transfer learn before a transfer how many elements of each piece have
changed."""
SENT_LAST = "weights sent last"
"""The memory plan's name of a training rank's copy of what it sent last."""
MOST_NUMEL = 2**31 - 1
"""Elements of a piece whose positions are int32."""


class Form(Enum):
    """What travels for a piece; equal sizes take the first."""

    POSITIONS = 0
    MASK = 1
    WHOLE = 2


class Payload(NamedTuple):
    """What travels for a piece with some changed elements."""

    form: Form
    index_bytes: int
    num_values: int
    value_bytes: int

    @property
    def num_bytes(self) -> int:
        """All bytes."""
        return self.index_bytes + self.value_bytes


def mask_bytes(numel: int) -> int:
    """Bytes of one bit for each element: also the most that an index takes."""
    return -(-numel // 8)


def payload_of(changed: int, numel: int, itemsize: int) -> Payload:
    """The smallest payload of a piece of `numel` elements, `changed` of which are other than before."""
    return min(
        Payload(Form.POSITIONS, changed * POSITION_BYTES, changed, changed * itemsize),
        Payload(Form.MASK, mask_bytes(numel), changed, changed * itemsize),
        Payload(Form.WHOLE, 0, numel, numel * itemsize),
        key=lambda payload: (payload.num_bytes, payload.form.value),
    )
