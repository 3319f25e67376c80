"""Let a world have several data-parallel groups of vLLM, in the order of `rank_order`.

Reason: with an external launcher vLLM takes `RANK // TP` as the data-parallel rank, so that a world can be one group
and no more. Its groups of ranks allow more of them (ExternalDP).
What it does: while `using_rank_order(order)` is active, the rank is that of the place inside its own group.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from third_party_patches.guard import VLLM, Patch
from third_party_patches.vllm.rank_order import current_order


def apply() -> None:
    """Replace `ParallelConfig.__post_init__`; must run before an engine's configuration is made."""
    from vllm.config.parallel import ParallelConfig

    usual = ParallelConfig.__post_init__
    if usual.__module__ == __name__:
        return

    @functools.wraps(usual)
    def __post_init__(self: Any) -> None:
        order = current_order()
        if order is None or self.data_parallel_size == 1:
            usual(self)
            return
        rank = os.environ["RANK"]
        place = order.index(int(rank)) % (self.tensor_parallel_size * self.data_parallel_size)
        os.environ["RANK"] = str(place)
        try:
            usual(self)
        finally:
            os.environ["RANK"] = rank

    __post_init__.__module__ = __name__
    ParallelConfig.__post_init__ = __post_init__


PATCH = Patch(VLLM, apply, drop_when="vLLM takes the data-parallel rank from its caller, or from its own groups")
