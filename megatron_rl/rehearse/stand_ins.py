"""What a rehearsing process does where other ranks, or files, would have to answer. Applied once, not undone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megatron_rl.experience.micro_batches import MicroBatch
from megatron_rl.hybrid_engine import offload, stable_memory, verify
from megatron_rl.hybrid_engine.plan import Member
from megatron_rl.hybrid_engine.transport import Transport
from megatron_rl.losses.aggregate import BatchTotals
from megatron_rl.rehearse.dispatch_mode import RehearsalMode
from megatron_rl.roles.model_source import UnloadedModel
from megatron_rl.roles.pipeline import Pipeline
from megatron_rl.roles.training import TrainableModel


def stand_in(mode: RehearsalMode, members: Sequence[Member]) -> None:
    """Apply all of them. members: of this rank's exchange group; none where weights are not shared."""
    _load_no_weights()
    _post_together(mode)
    _count_blocks(mode)
    _know_members(members)
    _move_no_bytes(mode)
    _count_for_all()


def _load_no_weights() -> None:
    """Parameters have no memory: there is nothing to read into them."""
    setattr(UnloadedModel, "load", lambda model: None)  # noqa: B010  mypy: it is a method


def _know_members(members: Sequence[Member]) -> None:
    """Ranks tell each other where their shards lie; nobody is there, so it is where the plan lays them.

    Raises RuntimeError where this rank's own lie elsewhere.
    """

    def all_gather_object(transport: Transport, value: Any) -> list[Any]:
        own = next((member for member in members if member.rank == value.rank), None)
        if own is None or in_order(own) != in_order(value):
            planned = [] if own is None else [slot.name for slot in in_order(own).held]
            laid = [slot.name for slot in in_order(value).held]
            raise RuntimeError(f"{value.name} lays its shards otherwise than planned: {laid}, not {planned}")
        return [value if member is own else member for member in members]

    def in_order(member: Member) -> Member:
        return replace(member, held=tuple(sorted(member.held, key=lambda slot: (slot.buffer, slot.offset))))

    setattr(Transport, "all_gather_object", all_gather_object)  # noqa: B010  mypy: it is a method


def _move_no_bytes(mode: RehearsalMode) -> None:
    """Memory that comes and goes is fake, and arrives as it was sent."""
    start, take = Transport.start, stable_memory.take

    def start_both(transport: Transport, send: Any, receive: Any) -> Any:
        with mode.one_batch():
            return start(transport, send, receive)

    setattr(Transport, "start", start_both)  # noqa: B010  mypy: it is a method
    vars(verify)["places_of_true"] = lambda flags: []
    vars(stable_memory)["take"] = lambda numel, dtype, device, tag: take(numel, dtype, device, None)
    for module in (offload, stable_memory):
        vars(module)["as_bytes"] = lambda storage: mode.unheld_bytes(storage.nbytes())


def _count_blocks(mode: RehearsalMode) -> None:
    """Note how many micro-batches a pass has."""
    schedule = Pipeline._schedule

    def _schedule(pipeline: Pipeline, step: Any, blocks: Any, **options: Any) -> Any:
        mode.num_blocks[mode.phase] += len(blocks)
        return schedule(pipeline, step, blocks, **options)

    setattr(Pipeline, "_schedule", _schedule)  # noqa: B010  mypy: it is a method


def _count_for_all() -> None:
    """The tokens of a mini-batch are added up over ranks, of which one reports each shared micro-batch: here each rank
    reports all that it has, and one that has none knows that others do. Without tokens no rank would step.
    """
    counted = TrainableModel.totals

    def totals(model: TrainableModel, blocks: list[MicroBatch]) -> BatchTotals:
        found = counted(model, [replace(block, is_reported=True) for block in blocks])
        return BatchTotals(max(1, found.tokens), max(1, found.rows))

    setattr(TrainableModel, "totals", totals)  # noqa: B010  mypy: it is a method


def _post_together(mode: RehearsalMode) -> None:
    """Sends and receives that are posted at once are recorded as one batch."""
    post = dist.batch_isend_irecv

    def batch_isend_irecv(operations: list[Any]) -> Any:
        with mode.one_batch():
            return post(operations)

    vars(dist)["batch_isend_irecv"] = batch_isend_irecv
