"""Weight transfers: two worlds of gloo processes, real layouts, every element compared."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from joined_pools import Pools, RolloutRank, TrainingRank, join
from late_messages import LateMessages
from ranks import common_store, fork_server, meeting_place, run_ranks

from megatron_rl.device import Device
from megatron_rl.hybrid_engine import schedule, transfer_plan
from megatron_rl.hybrid_engine.streams import Constants
from megatron_rl.hybrid_engine.transport import Transport, open_joint_group
from megatron_rl.hybrid_engine.verify import WeightMismatchError
from megatron_rl.hybrid_engine.weight_transfer import WeightReceiver
from megatron_rl.model.families import ModelShape
from megatron_rl.parallel.rank_grid import TrainGrid
from megatron_rl.parallel.sharding import LogicalTensor, Segment, shard_of
from megatron_rl.parallel.stages import StagePlan

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

DENSE = ModelShape(4, 32, 4, 4, 8, 48, 70, tied=True)
GROUPED = ModelShape(4, 32, 4, 2, 8, 48, 70, tied=False)
MOE = ModelShape(2, 32, 4, 2, 8, 16, 70, tied=False, num_experts=4)
NODES = {"train_nodes": [0, 1], "rollout_nodes": [2, 2, 3, 3]}
CASES = [
    Pools("TP2PP2-2xTP2", TrainGrid(4, 2, 2), StagePlan(4, 2), 2, 2, DENSE, "Qwen2ForCausalLM", options=NODES),
    Pools("TP2DP2-3xTP1", TrainGrid(4, 2, 1), StagePlan(4, 1), 1, 3, DENSE, options={"rollout_nodes": [0, 5, 5]}),
    Pools("PP2VPP2-TP4", TrainGrid(2, 1, 2), StagePlan(4, 2, 2), 4, 1, GROUPED, options={"rollout_nodes": [1, 2]}),
    Pools("TP2EP2-2xTP2", TrainGrid(2, 2, 1, 2, 1), StagePlan(2, 1), 2, 2, MOE, "Qwen3MoeForCausalLM"),
    Pools("DP2-TP1-bfloat16", TrainGrid(2, 1, 1), StagePlan(4, 1), 1, 1, GROUPED, dtype=torch.bfloat16),
]
PAIR = replace(CASES[-1], dtype=torch.float32)
TP2DP2 = TrainGrid(4, 2, 1), StagePlan(4, 1)
FOLLOWERS = [
    replace(CASES[0], name="TP2PP2-PP4", follower=(TrainGrid(4, 1, 4), StagePlan(4, 4))),
    replace(CASES[2], name="PP2VPP2-TP2PP2", follower=(TrainGrid(4, 2, 2), StagePlan(4, 2))),
    replace(CASES[3], name="TP2EP2-EP4", follower=(TrainGrid(4, 1, 1, 4), StagePlan(2, 1))),
    replace(CASES[4], name="DP2-TP2DP2-bfloat16", follower=TP2DP2, options={"rollout_nodes": [0, 0, 1, 1]}),
    replace(CASES[0], name="TP2PP2-PP2VPP2", follower=(TrainGrid(2, 1, 2), StagePlan(4, 2, 2))),
]
"""Pools whose roles follow the policy, in training layouts of their own; in the first and the last stages share a tied
embedding."""
BUCKET_BYTES = 16 << 10


def small_messages():
    """Several messages for each pair, of both kinds, and chunks that have to be cut."""
    patches = mock.patch.object(schedule, "DIRECT_NUMEL", 512), mock.patch.object(transfer_plan, "MIN_CHUNK", 64)
    for patch in patches:
        patch.start()


def transfer_rank(pools: Pools, make_transport=Transport) -> dict:
    """Two transfers with an update in between; what the test looks at."""
    small_messages()
    transport = join(pools.train.world_size, 30, make_transport)
    trains = transport.number < pools.train.world_size
    rank = (TrainingRank if trains else RolloutRank)(pools, transport, BUCKET_BYTES)
    found = {"reports": [], "wrong": [], "trains": trains}
    for step in range(2):
        if trains:
            rank.update(seed=step)
            found["reports"].append(rank.end.send(version=10 + step))
        else:
            addresses = {name: tensor.data_ptr() for name, tensor in rank.end.tensors.items()}
            found["reports"].append(rank.end.receive())
            found["wrong"] += rank.differing(seed=step)
            found["stays"] = addresses == {name: tensor.data_ptr() for name, tensor in rank.end.tensors.items()}
            found["version"] = rank.end.version
            wanted = transfer_plan.named(rank.tensors, rank.member.names).values()
            places = [shard_of(tensor, rank.member.wanted) for tensor in wanted]
            found["needed"] = pools.dtype.itemsize * sum(
                part.box[0][1] - part.box[0][0]
                if len(part.box) == 1
                else torch.Size(b - a for a, b in part.box).numel()
                for shard in places
                for part in shard.parts
            )
    found["scratch"] = (rank.end.scratch.num_bytes, rank.end.scratch.is_allocated)
    found["sent_to"], found["received_from"] = transport.sent_to, transport.received_from
    found["model_bytes"] = pools.dtype.itemsize * sum(tensor.numel for tensor in rank.tensors.values())
    # Both worlds' own collectives still work.
    total = torch.ones(1)
    dist.all_reduce(total)
    found["own_world"] = int(total)
    return found


@pytest.mark.parametrize(
    "late", [pytest.param(False, marks=pytest.mark.exhaustive, id=""), pytest.param(True, id="late")]
)
@pytest.mark.parametrize("pools", [*CASES, *FOLLOWERS], ids=lambda pools: pools.name)
def test_every_rollout_rank_gets_its_shard_and_not_a_byte_more(pools, late) -> None:
    """Element by element, twice; bytes counted where messages begin. Would not catch padding inside gloo."""
    make_transport = partial(LateMessages, seed=1) if late else Transport
    ranks = run_ranks(pools.world_size, transfer_rank, pools, make_transport, timeout=60)
    training, rollout = ranks[: pools.train.world_size], ranks[pools.train.world_size :]
    model_bytes = ranks[0]["model_bytes"]
    for rank in ranks:
        assert [report.version for report in rank["reports"]] == [10, 11]
        assert all(report.model_bytes == model_bytes for report in rank["reports"])
        num_bytes, is_allocated = rank["scratch"]
        assert num_bytes <= BUCKET_BYTES and not (num_bytes and is_allocated)
        assert rank["own_world"] == (len(training) if rank["trains"] else len(rollout))
    for rank in rollout:
        assert not rank["wrong"] and rank["stays"] and rank["version"] == 11
        for report in rank["reports"]:
            assert report.bytes_received == report.lower_bound_bytes == rank["needed"]
        assert rank["received_from"].total() == 2 * rank["needed"]
    for number in range(2):
        assert sum(rank["reports"][number].bytes_sent for rank in training) == model_bytes
        assert sum(rank["reports"][number].bytes_fetched for rank in rollout) == model_bytes
        received = sum(rank["reports"][number].bytes_received for rank in rollout)
        assert received == model_bytes + sum(rank["reports"][number].bytes_passed_on for rank in rollout)
    for number, rank in enumerate(ranks):
        assert rank["sent_to"] == Counter({other: ranks[other]["received_from"][number] for other in rank["sent_to"]})


def flip_one_bit(transport: Transport) -> None:
    """The next message that this rank receives loses its first element's lowest bit."""
    finish = transport.finish

    def finish_with_a_flip(works, receive):
        finish(works, receive)
        if receive is not None:
            receive[0].view(torch.int32).view(-1)[0] ^= 1
            transport.finish = finish

    transport.finish = finish_with_a_flip


def flipped_rank(pools: Pools, verify_every: int) -> dict:
    """Three transfers; the first two are flipped on the last rollout rank."""
    transport = join(pools.train.world_size, 30)
    trains = transport.number < pools.train.world_size
    rank = (TrainingRank if trains else RolloutRank)(pools, transport, BUCKET_BYTES, 0 if trains else verify_every)
    messages, versions = [], []
    for step in range(3):
        if transport.number == transport.size - 1 and step < 2:
            flip_one_bit(transport)
        try:
            report = rank.end.send(version=step) if trains else rank.end.receive()
            messages.append("")
            versions.append(report.version)
        except WeightMismatchError as error:
            messages.append(str(error))
            versions.append(None if trains else rank.end.version)
    return {"messages": messages, "versions": versions, "wrong": [] if trains else rank.differing(seed=0)}


def test_a_flipped_bit_is_caught_on_all_ranks_of_both_pools() -> None:
    """The last receiver names the tensor and its owner; the others name the receiver; a later transfer mends it.

    Would not catch a flip after checking.
    """
    ranks = run_ranks(CASES[0].world_size, flipped_rank, CASES[0], 1)
    for number, rank in enumerate(ranks):
        assert rank["versions"] == [None, None, 2] and rank["messages"][2] == "" and not rank["wrong"]
        pool = f"training rank {number}" if number < 4 else f"rollout rank {number - 4}"
        assert all(message.startswith(f"{pool}: ") for message in rank["messages"][:2])
        if number < 4:
            found = re.search(r"weights are right here, but wrong on rank\(s\) \[(.*)\]", rank["messages"][0])
            assert "rollout 3" in found[1].split(", ")
    assert "differ from those of training rank" in ranks[7]["messages"][0]


def test_the_first_transfer_is_always_verified_and_later_ones_when_asked_for() -> None:
    """With 0 at both ends the second transfer's flip goes unseen: it is what was asked for."""
    for rank in run_ranks(PAIR.world_size, flipped_rank, PAIR, 0):
        assert rank["messages"][0] != "" and rank["messages"][1:] == ["", ""] and rank["versions"][1:] == [1, 2]


def mixed_versions_rank(pools: Pools) -> str:
    transport = join(pools.train.world_size, 30)
    if transport.number < pools.train.world_size:
        transfer = partial(TrainingRank(pools, transport, BUCKET_BYTES).end.send, version=transport.number)
    else:
        transfer = RolloutRank(pools, transport, BUCKET_BYTES).end.receive
    with pytest.raises(RuntimeError) as raised:
        transfer()
    return str(raised.value)


def constants_rank(pools: Pools) -> list[tuple]:
    """Of each transfer: (bytes at their bound, bytes of constants, they wait for the swap, they are those sent)."""
    transport, found = join(pools.train.world_size, 30), []
    trains = transport.number < pools.train.world_size
    described = {name: LogicalTensor(name, (Segment("all", (5,), 1),), None) for name in ("a", "b")}
    constants = Constants(described, torch.device("cpu"), second_buffer=not trains)
    rank = (TrainingRank if trains else partial(RolloutRank, second_buffer=True))(
        pools, transport, BUCKET_BYTES, constants=constants
    )
    for version in range(4):
        values = {name: torch.arange(5.0) + 10 * version * len(name) for name in described}
        if trains:
            constants.fill(values)
            report = rank.end.send(version, with_constants=version in (1, 3))
            found.append((report.leaving_bytes - (0 if version else report.model_bytes), report.bytes_sent))
            continue
        before = {name: tensor.clone() for name, tensor in constants.tensors.items()}
        report = rank.end.receive()
        waits = all(torch.equal(tensor, before[name]) for name, tensor in constants.tensors.items())
        rank.end.swap()
        is_new = all(torch.equal(tensor, values[name]) for name, tensor in constants.tensors.items())
        found.append((report.bytes_received == report.lower_bound_bytes, report.bytes_received, waits, is_new))
    return found


def test_constants_travel_in_their_own_dtype_next_to_bfloat16_weights() -> None:
    """Float32 where training says so, to the byte, into a second buffer, next to weights of which nothing changed.
    Would not catch constants that differ on the training ranks, which `ExpertBias.whole` rules out.
    """
    pools = replace(CASES[-1], deltas=True)
    ranks = run_ranks(pools.world_size, constants_rank, pools)
    training, rollout = ranks[: pools.train.world_size], ranks[pools.train.world_size :]
    for found in training:
        assert [leaving for leaving, _ in found] == [0, 40, 0, 40]
    assert [sum(found[number][1] for found in training) for number in (1, 2, 3)] == [40, 0, 40]
    for found in rollout:
        assert all(bound and waits for bound, _, waits, _ in found)
        assert [received for _, received, _, _ in found[1:]] == [40, 0, 40]
        assert [is_new for *_, is_new in found] == [False, True, False, True]


def misfit_rank(pools: Pools) -> list[str]:
    """Ends that do not fit each other; every rank is told."""
    transport = join(pools.train.world_size, 30)
    trains, found = transport.number < pools.train.world_size, []
    _, receivers, tensors = pools.members()
    fewer = dict(list(tensors.items())[1:])
    for wrong in ({"dtype": torch.float16}, {"tensors": fewer}):
        arguments = {"dtype": pools.dtype, "tensors": tensors} | wrong
        with pytest.raises(ValueError) as raised:
            if trains:
                TrainingRank(pools, transport, BUCKET_BYTES)
            else:
                member = receivers[transport.number - pools.train.world_size]
                end = WeightReceiver(member.wanted, device=torch.device("cpu"), bucket_bytes=BUCKET_BYTES, **arguments)
                end.join(member, transport)
        found.append(str(raised.value))
    return found


def test_ends_that_do_not_fit_are_refused_on_all_ranks() -> None:
    """Versions, dtypes and models. Would not catch models that differ in their weights only."""
    pools = PAIR
    for message in run_ranks(pools.world_size, mixed_versions_rank, pools):
        assert message == "the training ranks send weights of different versions: [0, 1]"
    for first, second in run_ranks(pools.world_size, misfit_rank, pools):
        assert first == "a weight transfer has one dtype, and its ends have ['torch.float16', 'torch.float32']"
        assert second.startswith("the ends of a weight transfer have different models")


TIMEOUT_S = 4


def deserted_rank(pools: Pools, who: int, dies: bool, variables: dict[str, str], answers) -> None:
    """One transfer goes well. Then member `who` is killed, or stays away; the others say how it ends and when."""
    os.environ |= variables
    small_messages()
    transport = join(pools.train.world_size, TIMEOUT_S)
    trains = transport.number < pools.train.world_size
    rank = (TrainingRank if trains else RolloutRank)(pools, transport, BUCKET_BYTES)
    transfer = partial(rank.end.send, version=1) if trains else rank.end.receive
    transfer()
    if transport.number == who:
        if dies:
            start = transport.start
            left = iter(range(3))

            def start_until_killed(send, receive):
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return start(send, receive)

            transport.start = start_until_killed
            transfer()
        time.sleep(3 * TIMEOUT_S)
    begin = time.monotonic()
    try:
        transfer()
        answers.put((transport.number, "", 0.0))
    except RuntimeError as error:
        answers.put((transport.number, str(error), time.monotonic() - begin))


@pytest.mark.parametrize(("who", "dies"), [(1, True), (5, True), (3, False)], ids=["sender", "receiver", "absent"])
def test_a_peer_that_dies_or_stays_away_ends_in_an_error_on_all_ranks(who, dies) -> None:
    """Killed in the middle of its messages. Within the group's time-out. Would not catch a machine that goes silent."""
    context, pools = fork_server(), CASES[0]
    answers = context.Queue()
    with meeting_place(pools.world_size) as variables:
        processes = [
            context.Process(
                target=deserted_rank, args=(pools, who, dies, variables | {"RANK": str(number)}, answers), daemon=True
            )
            for number in range(pools.world_size)
        ]
        try:
            for process in processes:
                process.start()
            gathered = [answers.get(timeout=60) for _ in range(len(processes) - 1)]
            ends = {number: rest for number, *rest in gathered}
            processes[who].join(0 if not dies else 5)
            assert processes[who].exitcode == (-signal.SIGKILL if dies else None)
        finally:
            for process in processes:
                process.kill()
                process.join()
    assert ends.keys() == set(range(pools.world_size)) - {who}
    for message, seconds in ends.values():
        assert message and seconds < TIMEOUT_S + 3


def missing_rank() -> float:
    """Open a group of three, of which there are two; seconds until the error."""
    number = int(os.environ["RANK"])
    store = common_store(timedelta(seconds=30))
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        open_joint_group(store, number, 3, Device("cpu"), timedelta(seconds=2))
    return time.monotonic() - begin


def test_a_group_with_a_missing_rank_does_not_open() -> None:
    """On every rank, at its own time-out and not the store's. Would not catch a rank that joins too late."""
    assert max(run_ranks(2, missing_rank)) < 5


def met_by_two_of_three(timeout: timedelta) -> tuple[str, float]:
    """All three come, and the last does no more, as a process that is stopped; of the others what they are told, after
    how many seconds.
    """
    from megatron_rl.hybrid_engine.weight_transfer import BrokenTransferError
    from megatron_rl.roles import transfer_address

    transfer_address.MEET_S = 2.0
    number = int(os.environ["RANK"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    address = transfer_address.TransferAddress(host, port, num_senders=1, num_receivers=2)
    store = common_store(timeout)
    if number == 2:
        store.set(transfer_address.here_key(number), "")
        store.wait(["over/0", "over/1"])
        return "", 0.0
    begin = time.monotonic()
    with pytest.raises(BrokenTransferError) as error:
        transfer_address.join_transfer(address, number, Device("cpu"), timeout)
    seconds = time.monotonic() - begin
    store.set(f"over/{number}", "")
    return str(error.value), seconds


def test_a_rank_that_stops_when_all_have_come_keeps_nobody_for_long() -> None:
    """Whoever has come is expected at once, however long a message may take. Would not catch one that stops later."""
    *others, _ = run_ranks(3, met_by_two_of_three, timedelta(seconds=60))
    for told, seconds in others:
        assert "was lost before the weight transfer was connected" in told and seconds < 10
