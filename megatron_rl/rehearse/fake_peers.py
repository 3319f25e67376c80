"""What a rehearsing process does where other ranks, or files, would have to answer. Applied once, not undone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from megatron_rl.device import Device
from megatron_rl.hybrid_engine import offload, stable_memory, verify
from megatron_rl.hybrid_engine.plan import Member
from megatron_rl.hybrid_engine.transport import Transport
from megatron_rl.hybrid_engine.weight_transfer import Offer
from megatron_rl.rehearse.dispatch_mode import RehearsalMode
from megatron_rl.rehearse.rehearsed_transfer import JointRanks, fake_joint_group, names_of, same_place
from megatron_rl.roles import distillation_terms, model_source, policy_followers, received_weights
from megatron_rl.roles.model_source import UnloadedModel
from megatron_rl.roles.pipeline import Pipeline
from megatron_rl.roles.training import TrainableModel
from megatron_rl.roles.transfer_address import TransferAddress


def replace_peers(mode: RehearsalMode, members: Sequence[Sequence[Member]], joint: JointRanks | None) -> None:
    """Apply all of them. members: of this rank's exchange group, as they hold weights, and again as they hold adapters;
    none where weights are not shared. joint: the ranks of the weight transfer between pools; None: there is none.
    """
    _load_no_weights()
    _attend_without_scores()
    _post_together(mode)
    _count_blocks(mode)
    _know_members(members, joint)
    _meet_nobody(mode, joint)
    _move_no_bytes(mode)
    _count_for_all()


def _load_no_weights() -> None:
    """Parameters have no memory: there is nothing to read into them."""
    setattr(UnloadedModel, "load", lambda model: None)  # noqa: B010  mypy: it is a method
    vars(distillation_terms)["read_rows"] = lambda *arguments: None
    vars(model_source)["read_tower"] = lambda *arguments: None


def _attend_without_scores() -> None:
    """Let vision towers attend by the kernel that torch takes on CUDA: a torch for CPUs takes one that makes scores."""
    attend = functional.scaled_dot_product_attention

    def of_cuda(query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Any:
        asked = {name: option for name, option in options.items() if name != "scale" and option}
        if others or asked or not query.is_cuda:
            return attend(query, key, value, *others, **options)
        by_flash = torch.ops.aten._scaled_dot_product_flash_attention
        return by_flash(query, key, value, 0.0, False, scale=options.get("scale"))[0]

    vars(functional)["scaled_dot_product_attention"] = of_cuda


def _know_members(members: Sequence[Sequence[Member]], joint: JointRanks | None) -> None:
    """Ranks tell each other where their shards are; nobody is there, so it is where the plan lays them.

    Raises RuntimeError where this rank's own are elsewhere.
    """

    def all_gather_object(transport: Transport, value: Any) -> list[Any]:
        if isinstance(value, Offer):
            assert joint is not None  # an offer is for a weight transfer
            _check_place(value.member, joint.members[transport.number])
            return joint.offers(value)
        group = max(members, key=lambda each: _num_common(each, value))
        own = next((member for member in group if member.rank == value.rank), None)
        _check_place(value, own)
        return [value if member is own else member for member in group]

    setattr(Transport, "all_gather_object", all_gather_object)  # noqa: B010  mypy: it is a method


def _num_common(group: Sequence[Member], laid: Member) -> int:
    """How many of a member's shards are in a group's table of it."""
    return sum(len({*names_of(member)} & {*names_of(laid)}) for member in group if member.rank == laid.rank)


def _check_place(laid: Member, planned: Member | None) -> None:
    if planned is None or not same_place(laid, planned):
        raise RuntimeError(f"{laid.name} has other shards than planned: {names_of(laid)}, not {names_of(planned)}")


def _meet_nobody(mode: RehearsalMode, joint: JointRanks | None) -> None:
    """Open a weight transfer without the ranks of the other side."""
    if joint is None:
        return

    def join_transfer(address: TransferAddress, number: int, device: Device, timeout: timedelta) -> Transport:
        group = fake_joint_group(number, address.size)
        mode.joint = group, joint.numbers
        return Transport(group, is_own=True)

    for module in (policy_followers, received_weights):
        vars(module)["join_transfer"] = join_transfer


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
    """Add up the tokens of a mini-batch over ranks, of which one reports each shared micro-batch: here each rank
    reports all that it has, and one that has none knows that others do. Without tokens no rank would step.
    """
    counted = TrainableModel.totals

    def totals(model: TrainableModel, blocks: list[Any]) -> Any:
        batch = counted(model, [replace(block, is_reported=True) for block in blocks])
        return replace(batch, tokens=max(1, batch.tokens), rows=max(1, batch.rows))

    setattr(TrainableModel, "totals", totals)  # noqa: B010  mypy: it is a method


def _post_together(mode: RehearsalMode) -> None:
    """Record sends and receives that are posted at once as one batch."""
    post = dist.batch_isend_irecv

    def batch_isend_irecv(operations: list[Any]) -> Any:
        with mode.one_batch():
            return post(operations)

    vars(dist)["batch_isend_irecv"] = batch_isend_irecv
