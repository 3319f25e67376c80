"""What a rehearsing process does where other ranks, or files, would have to answer. Applied once, not undone."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_rl.rehearse.dispatch_mode import RehearsalMode
from megatron_rl.roles.model_source import UnloadedModel
from megatron_rl.roles.pipeline import Pipeline


def stand_in(mode: RehearsalMode) -> None:
    """Apply all of them."""
    _load_no_weights()
    _post_together(mode)
    _know_shapes()


def _load_no_weights() -> None:
    """Parameters have no memory: there is nothing to read into them."""
    setattr(UnloadedModel, "load", lambda model: None)  # noqa: B010  mypy: it is a method


def _post_together(mode: RehearsalMode) -> None:
    """Sends and receives that are posted at once are recorded as one batch."""
    post = dist.batch_isend_irecv

    def batch_isend_irecv(operations: list[Any]) -> Any:
        with mode.one_batch():
            return post(operations)

    vars(dist)["batch_isend_irecv"] = batch_isend_irecv


def _know_shapes() -> None:
    """Stages tell each other the shapes of what they send; nobody is there, so they are those of the blocks."""
    schedule, ask = Pipeline._schedule, P2PCommunicator._communicate_shapes
    shapes: list[list[int]] = []
    asked = {"previous": 0, "next": 0}

    def _schedule(pipeline: Pipeline, step: Any, blocks: Any, **options: Any) -> Any:
        config, cp_size = pipeline.chunks[0].config, pipeline.groups.grid.cp_size
        parts = pipeline.groups.grid.tp_size if config.sequence_parallel else 1
        columns = [block.input_ids.shape[1] // (block.num_sharing or cp_size) // parts for block in blocks]
        shapes[:] = [
            [column, len(block.input_ids), config.hidden_size] for column, block in zip(columns, blocks, strict=True)
        ]
        asked.update(dict.fromkeys(asked, 0))
        return schedule(pipeline, step, blocks, **options)

    def _communicate_shapes(
        communicator: Any, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> list[Any]:
        found = list(ask(communicator, tensor_send_next, tensor_send_prev, recv_prev, recv_next))
        for number, (wanted, side) in enumerate(((recv_prev, "previous"), (recv_next, "next"))):
            if wanted:
                found[number] = shapes[asked[side] % len(shapes)]
                asked[side] += 1
        return found

    setattr(Pipeline, "_schedule", _schedule)  # noqa: B010  mypy: it is a method
    P2PCommunicator._communicate_shapes = _communicate_shapes
