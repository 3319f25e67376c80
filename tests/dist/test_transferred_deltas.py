"""Only what changed travels in a weight transfer: gloo processes, real layouts, every bit compared, bytes counted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from joined_pools import Pools, RolloutRank, TrainingRank, join
from late_messages import LateMessages
from ranks import run_ranks
from sweeps import WEEKLY

from megatron_rl.hybrid_engine import delta_exchange, transfer_plan
from megatron_rl.hybrid_engine.deltas import as_bits
from megatron_rl.hybrid_engine.layout import split_box
from megatron_rl.hybrid_engine.transfer_plan import make_transfer_plan
from megatron_rl.hybrid_engine.transport import Transport
from megatron_rl.hybrid_engine.verify import WeightMismatchError
from megatron_rl.model.families import ModelShape
from megatron_rl.parallel.rank_grid import TrainGrid
from megatron_rl.parallel.sharding import box_index, box_numel
from megatron_rl.parallel.stages import StagePlan

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]

DENSE = ModelShape(4, 32, 4, 4, 8, 48, 70, tied=True)
MOE = ModelShape(2, 32, 4, 2, 8, 16, 70, tied=False, num_experts=4)
NODES = {"train_nodes": [0, 1], "rollout_nodes": [2, 2, 3, 3]}
DRIFTS = (0.01, 0.0, 0.2, 0.002, 1.0, 0.01)
"""The share of the elements that each update after the first transfer changes."""
BFLOAT16 = {"dtype": torch.bfloat16, "deltas": True, "drifts": DRIFTS}
TWO_REPLICAS = Pools("TP2PP2-2xTP1", TrainGrid(4, 2, 2), StagePlan(4, 2), 1, 2, DENSE, **BFLOAT16)
ON_NODES = Pools("TP2PP2-2xTP2", TrainGrid(4, 2, 2), StagePlan(4, 2), 2, 2, DENSE, "Qwen2ForCausalLM", options=NODES)
CASES = [
    TWO_REPLICAS,
    replace(ON_NODES, **BFLOAT16),
    replace(TWO_REPLICAS, name="float32", dtype=torch.float32),
    Pools("TP2EP2-2xTP2", TrainGrid(2, 2, 1, 2, 1), StagePlan(2, 1), 2, 2, MOE, "Qwen3MoeForCausalLM", **BFLOAT16),
]
OFTEN = CASES[:2]
BUCKET_BYTES = 16 << 10


def bounds_by_hand(pools: Pools, number: int, step: int) -> tuple[int, int]:
    """(bytes that must come to a member when only what changed travels, changed elements of the whole model).

    Each piece of the plan, cut into messages, costs the least of three forms.
    """
    senders, receivers, tensors = pools.members()
    plan, itemsize = make_transfer_plan(tensors, senders, receivers), pools.dtype.itemsize
    before, now = pools.model(tensors, step - 1), pools.model(tensors, step)
    changed = {key: as_bits(weights) != as_bits(before[key]) for key, weights in now.items()}
    total = 0
    for piece in plan.plans[number].received:
        for box in split_box(piece.box, BUCKET_BYTES // itemsize // 4):
            count, numel = int(changed[piece.name, piece.segment][box_index(box)].sum()), box_numel(box)
            total += min(count * (4 + itemsize), -(-numel // 8) + count * itemsize, numel * itemsize)
    return total, sum(int(flags.sum()) for flags in changed.values())


def versions_rank(pools: Pools, second_buffer: bool, make_transport) -> dict:
    """A transfer of everything, then those of DRIFTS; with a second buffer only every other version is read."""
    mock.patch.object(transfer_plan, "MIN_CHUNK", 64).start()
    transport = join(pools.train.world_size, 60, make_transport)
    trains = transport.number < pools.train.world_size
    rank = (TrainingRank if trains else partial(RolloutRank, second_buffer=second_buffer))(
        pools, transport, BUCKET_BYTES
    )
    found = {"reports": [], "wrong": [], "bounds": [], "counted": [], "trains": trains}
    for step in range(1 + len(DRIFTS)):
        before = transport.received_from.copy()
        if trains:
            rank.update(seed=step)
            found["reports"].append(rank.end.send(version=step))
        else:
            found["reports"].append(rank.end.receive())
            if not second_buffer or step % 2 == 0:
                if second_buffer:
                    rank.end.swap()
                found["wrong"] += rank.differing(seed=step)
                assert rank.end.version == step
        found["counted"].append((transport.received_from - before).total())
        found["bounds"].append(bounds_by_hand(pools, transport.number, step) if step else (0, 0))
    found["model_bytes"] = pools.dtype.itemsize * sum(tensor.numel for tensor in rank.tensors.values())
    found["kept"] = rank.end.kept_bytes if trains else 0
    scratch = rank.end.scratch
    found["scratch"] = scratch.num_bytes if scratch.is_allocated else 0
    return found


def marked(pools: Pools, second_buffer: bool, late: bool):
    often = pools in OFTEN and (second_buffer, late) == (pools is TWO_REPLICAS, pools is not TWO_REPLICAS)
    marks = [] if often else [pytest.mark.exhaustive] if second_buffer != late else WEEKLY
    name = "-".join([pools.name, *["second"] * second_buffer, *["late"] * late])
    return pytest.param(pools, second_buffer, late, marks=marks, id=name)


@pytest.mark.parametrize(
    ("pools", "second_buffer", "late"),
    [marked(pools, second, late) for pools in CASES for second in (False, True) for late in (False, True)],
)
def test_changes_make_the_same_bits_for_no_byte_more_than_they_need(pools, second_buffer, late) -> None:
    """Seven versions, every bit of every shard; bytes against a count by hand from the models alone. The plan is that
    of the run. Would not catch bytes inside gloo.
    """
    make_transport = partial(LateMessages, seed=1) if late else Transport
    ranks = run_ranks(pools.world_size, versions_rank, pools, second_buffer, make_transport, timeout=120)
    training, rollout = ranks[: pools.train.world_size], ranks[pools.train.world_size :]
    model_bytes, itemsize = ranks[0]["model_bytes"], pools.dtype.itemsize
    assert sum(rank["kept"] for rank in training) == model_bytes
    assert not any(rank["wrong"] or rank["scratch"] for rank in ranks)
    for step in range(1 + len(DRIFTS)):
        reports = [rank["reports"][step] for rank in ranks]
        sent = sum(rank["reports"][step].bytes_sent for rank in training)
        fetched = sum(rank["reports"][step].bytes_fetched for rank in rollout)
        passed_on = sum(rank["reports"][step].bytes_passed_on for rank in rollout)
        received = sum(rank["reports"][step].bytes_received for rank in rollout)
        assert {report.leaving_bytes for report in reports} == {sent} == {fetched} == {received - passed_on}
        assert {report.version for report in reports} == {step}
        for rank in rollout:
            report, (bound, changed) = rank["reports"][step], rank["bounds"][step]
            assert report.bytes_received == report.lower_bound_bytes == rank["counted"][step]
            assert report.network_bytes == report.network_bound_bytes
            if step == 0:
                assert report.changed_share is None and report.leaving_bytes == model_bytes and not report.count_bytes
            else:
                assert report.bytes_received == bound
                assert report.changed_share == changed * itemsize / model_bytes
                assert sent <= model_bytes and report.count_bytes > 0
        if step and DRIFTS[step - 1] <= 0.01:
            assert sent <= changed * (itemsize + 4) and (sent == 0) == (DRIFTS[step - 1] == 0.0)
        if step and DRIFTS[step - 1] == 1.0:
            assert sent == model_bytes


def planted(kind: str) -> None:
    """The next change that this rank writes is lost, or has a wrong bit, or lands one element further."""
    write = delta_exchange.write_values

    def write_wrong(buffer, region, form, index, values):
        if values.numel():
            delta_exchange.write_values = write
            if kind == "dropped":
                return
            if kind == "flipped":
                values[0] ^= 1
            else:
                index.view(torch.int32)[0] ^= 1
        write(buffer, region, form, index, values)

    delta_exchange.write_values = write_wrong


def wrong_rank(pools: Pools, kinds: tuple[str, ...]) -> dict:
    """A transfer of everything; then for each kind three: one in which the last rank writes a wrong change, and two
    that go well. Of each its error, if there is one, and the share of bytes that left training.
    """
    transport = join(pools.train.world_size, 60)
    trains = transport.number < pools.train.world_size
    rank = (TrainingRank if trains else RolloutRank)(pools, transport, BUCKET_BYTES)
    errors, shares = [], []
    for step in range(1 + 3 * len(kinds)):
        if step % 3 == 1 and transport.number == transport.size - 1:
            planted(kinds[step // 3])
        if trains:
            rank.update(seed=step)
        try:
            report = rank.end.send(version=step) if trains else rank.end.receive()
            errors.append("")
            shares.append(report.leaving_bytes / report.model_bytes)
        except WeightMismatchError as error:
            errors.append(str(error))
            shares.append(0.0)
            assert trains or rank.end.version is None
    return {"errors": errors, "shares": shares, "wrong": [] if trains else rank.differing(seed=step)}


def test_a_dropped_or_wrong_change_is_caught_on_all_ranks() -> None:
    """On the last receiver, and on the other, which it passes its part to; then everything travels once, which mends
    it, and after that changes again. Would not catch a change that is wrong at its owner's, too: there is nothing to
    compare it with.
    """
    kinds = ("dropped", "flipped", "misplaced")
    pools = replace(TWO_REPLICAS, drifts=(0.01,) * 3 * len(kinds))
    ranks = run_ranks(pools.world_size, wrong_rank, pools, kinds)
    for number, rank in enumerate(ranks):
        assert not rank["wrong"]
        for step, (error, share) in enumerate(zip(rank["errors"], rank["shares"], strict=True)):
            assert bool(error) == (step % 3 == 1)
            assert share == 1 if step == 0 or step % 3 == 2 else share < 0.05
        assert (": weights are right here" in rank["errors"][1]) == (number < pools.train.world_size)
    assert "differ from those of training rank" in ranks[-1]["errors"][1]


def one_sided_rank(pools: Pools) -> list[float | None]:
    """The training ranks send changes, and the rollout ranks take whole weights."""
    transport = join(pools.train.world_size, 60)
    trains = transport.number < pools.train.world_size
    rank = (TrainingRank if trains else RolloutRank)(replace(pools, deltas=trains), transport, BUCKET_BYTES)
    return [(rank.end.send(version=step) if trains else rank.end.receive()).changed_share for step in range(2)]


@pytest.mark.exhaustive
def test_changes_travel_only_if_both_sides_know_of_them() -> None:
    """Else everything does. Would not catch two ends of different versions of this program."""
    assert run_ranks(6, one_sided_rank, TWO_REPLICAS) == [[None, None]] * 6
