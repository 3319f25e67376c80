"""A replica is killed while weights come: two training ranks and two replicas, each process by itself, over gloo."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from joined_pools import Pools, RolloutRank, TrainingRank, join, killed_after, own_transport
from ranks import common_store, run_ranks

from megatron_rl.device import Device
from megatron_rl.hybrid_engine.allgather_pp import FlatParameters
from megatron_rl.hybrid_engine.transport import Transport, open_joint_group
from megatron_rl.hybrid_engine.weight_transfer import BrokenTransferError, WeightSender
from megatron_rl.model.families import ModelShape
from megatron_rl.parallel.rank_grid import TrainGrid
from megatron_rl.parallel.stages import StagePlan

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]

SHAPE = ModelShape(4, 32, 4, 4, 8, 48, 70, tied=True)
POOLS = Pools("PP2-2xTP1", TrainGrid(2, 1, 2), StagePlan(4, 2), 1, 2, SHAPE)
CHANGES = replace(POOLS, dtype=torch.bfloat16, deltas=True, drifts=(0.02, 0.01))
BUCKET_BYTES = 4 << 10
TIMEOUT_S = 40
"""Of the group; far more than any rank may wait."""


def rejoined(number: int, size: int, store: dist.Store) -> Transport:
    timeout = timedelta(seconds=TIMEOUT_S)
    return own_transport(open_joint_group(dist.PrefixStore("second", store), number, size, Device("cpu"), timeout))


def how_it_ends(transfer: Callable) -> tuple[str, float]:
    """(how the transfer broke, or nothing; seconds)."""
    begin = time.monotonic()
    try:
        transfer()
        return "", time.monotonic() - begin
    except BrokenTransferError as error:
        return str(error), time.monotonic() - begin


def trains(pools: Pools, transport: Transport, store: dist.Store) -> dict:
    rank = TrainingRank(pools, transport, BUCKET_BYTES)
    rank.end.send(version=1)
    rank.update(seed=1)
    broken, seconds = how_it_ends(lambda: rank.end.send(version=2))
    said = [""] * pools.train.world_size
    dist.all_gather_object(said, broken)  # the ranks' own world goes on
    rank.end.close()
    again = how_it_ends(lambda: rank.end.send(version=2))[0]
    own = FlatParameters(tuple(rank.buffers[number] for number in range(len(rank.buffers))), rank.member)
    again_joined = rejoined(rank.member.rank, 3, store)
    end = WeightSender(own, rank.tensors, again_joined, bucket_bytes=BUCKET_BYTES, deltas=pools.deltas)
    reports = [end.send(version=2)]
    rank.update(seed=2)
    reports.append(end.send(version=3))
    return {
        "broken": said,
        "seconds": seconds,
        "again": again,
        "sent": [report.bytes_sent for report in reports],
        "shares": [report.changed_share for report in reports],
        "leaving": [report.leaving_bytes for report in reports],
        "model_bytes": reports[0].model_bytes,
    }


def receives(
    pools: Pools, transport: Transport, store: dist.Store, dies: bool, second_buffer: bool, after: int
) -> dict:
    rank = RolloutRank(pools, transport, BUCKET_BYTES, second_buffer=second_buffer)
    addresses = {name: tensor.data_ptr() for name, tensor in rank.end.tensors.items()}
    rank.end.receive()
    if second_buffer:
        rank.end.swap()
    if dies:
        killed_after(transport, after)
    broken, seconds = how_it_ends(rank.end.receive)
    found = {"broken": broken, "seconds": seconds, "version": rank.end.version}
    found["kept"] = rank.differing(seed=0)
    rank.end.join(replace(rank.member, rank=0), rejoined(2, 3, store))
    found |= {"versions": [], "wrong": []}
    for seed in (1, 2):
        rank.end.receive()
        if second_buffer:
            rank.end.swap()
        found["versions"].append(rank.end.version)
        found["wrong"] += rank.differing(seed)
    found["stays"] = addresses == {name: tensor.data_ptr() for name, tensor in rank.end.tensors.items()}
    return found


def one_rank(pools: Pools, who: int, second_buffer: bool, after: int) -> dict:
    number = int(os.environ["RANK"])
    transport = join(pools.train.world_size, TIMEOUT_S, own_transport)
    store = common_store(timedelta(seconds=30))
    if number < pools.train.world_size:
        return trains(pools, transport, store)
    return receives(pools, transport, store, number == who, second_buffer, after)


@pytest.mark.parametrize(
    ("pools", "who", "second_buffer", "after"),
    [
        pytest.param(POOLS, 2, True, 3, id="whole-2-second"),
        pytest.param(POOLS, 3, False, 8, id="whole-3"),
        pytest.param(CHANGES, 2, True, 1, id="changes-2-second"),
        pytest.param(CHANGES, 3, False, 1, id="changes-3", marks=pytest.mark.exhaustive),
        *(
            pytest.param(POOLS, 2 + after // 2 % 2, True, after, id=f"after-{after}", marks=pytest.mark.exhaustive)
            for after in range(0, 14, 2)
        ),
    ],
)
def test_those_who_are_left_notice_rejoin_and_go_on(pools: Pools, who: int, second_buffer: bool, after: int) -> None:
    """Killed in the middle of its messages: all others know long before the group's time-out, the ranks of training
    agree, and with a second buffer generation keeps the old weights; then two transfers in a new group, every element
    compared; where changes travel, everything does in the first of these. Would not catch a machine that goes silent,
    which the group's time-out ends; nor NCCL.
    """
    ranks = run_ranks(pools.world_size, one_rank, pools, who, second_buffer, after, timeout=100, lost=(who,))
    found = {number: rank for number, rank in enumerate(ranks) if number != who}
    survivor = found[5 - who]
    assert found[0]["broken"] == found[1]["broken"] and any(found[0]["broken"])
    assert all(found[number]["again"].endswith("this rank has left the group") for number in (0, 1))
    assert max(rank["seconds"] for rank in found.values()) < TIMEOUT_S / 4
    assert survivor["broken"].startswith("a transfer of weights broke: ")
    if second_buffer:
        assert survivor["version"] == 1 and not survivor["kept"]
    else:
        assert survivor["version"] is None
    assert survivor["versions"] == [2, 3] and not survivor["wrong"] and survivor["stays"]
    for transfer in range(2):
        assert sum(found[number]["sent"][transfer] for number in (0, 1)) == found[0]["leaving"][transfer]
    assert found[0]["leaving"][0] == found[0]["model_bytes"] and found[0]["shares"][0] is None
    assert (
        (found[0]["leaving"][1] < found[0]["model_bytes"] / 10) == (found[0]["shares"][1] is not None) == pools.deltas
    )
