"""Let vLLM build groups of ranks that are not consecutive.

Reason: vLLM builds every group from `arange(world_size)`, so a tensor-parallel group always has consecutive ranks.
Generation with a smaller TP size than training needs strided groups, in which each rank's training shard is inside
its rollout shard.
What it does: while `using_rank_order(order)` is active, place i in vLLM's arithmetic is rank `order[i]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from third_party_patches.guard import VLLM, Patch

_order: ContextVar[Sequence[int] | None] = ContextVar("rank_order", default=None)


@contextmanager
def using_rank_order(order: Sequence[int]) -> Iterator[None]:
    """Build engines inside this block with groups from `order`. Raises ValueError unless it is a permutation."""
    if sorted(order) != list(range(len(order))):
        raise ValueError(f"{list(order)} is not an order of {len(order)} ranks")
    token = _order.set(order)
    try:
        yield
    finally:
        _order.reset(token)


def current_order() -> Sequence[int] | None:
    """The order that is active; None: vLLM's own."""
    return _order.get()


def apply() -> None:
    """Replace `init_model_parallel_group`; must run before an engine creates its groups."""
    from vllm.distributed import parallel_state

    if parallel_state.init_model_parallel_group.__module__ == __name__:
        return
    original = parallel_state.init_model_parallel_group

    def init_model_parallel_group(group_ranks: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        order = _order.get()
        if order is not None:
            group_ranks = [[order[place] for place in group] for group in group_ranks]
        return original(group_ranks, *args, **kwargs)

    parallel_state.init_model_parallel_group = init_model_parallel_group


PATCH = Patch(VLLM, apply, drop_when="vLLM accepts the ranks of its groups from its caller")
