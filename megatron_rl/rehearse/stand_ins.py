"""What a rehearsing process does where other ranks, or files, would have to answer. Applied once, not undone."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_rl.rehearse.dispatch_mode import RehearsalMode
from megatron_rl.roles.model_source import UnloadedModel
from megatron_rl.roles.pipeline import Pipeline


def stand_in(mode: RehearsalMode) -> None:
    """Apply all of them."""
    _load_no_weights()
    _post_together(mode)
    _count_blocks(mode)


def _load_no_weights() -> None:
    """Parameters have no memory: there is nothing to read into them."""
    setattr(UnloadedModel, "load", lambda model: None)  # noqa: B010  mypy: it is a method


def _count_blocks(mode: RehearsalMode) -> None:
    """Note how many micro-batches a pass has."""
    schedule = Pipeline._schedule

    def _schedule(pipeline: Pipeline, step: Any, blocks: Any, **options: Any) -> Any:
        mode.num_blocks[mode.phase] += len(blocks)
        return schedule(pipeline, step, blocks, **options)

    setattr(Pipeline, "_schedule", _schedule)  # noqa: B010  mypy: it is a method


def _post_together(mode: RehearsalMode) -> None:
    """Sends and receives that are posted at once are recorded as one batch."""
    post = dist.batch_isend_irecv

    def batch_isend_irecv(operations: list[Any]) -> Any:
        with mode.one_batch():
            return post(operations)

    vars(dist)["batch_isend_irecv"] = batch_isend_irecv
