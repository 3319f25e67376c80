"""Transitions of ranks that are said to sit on several nodes, with late messages; the ranks share a machine.

Why nodes cannot matter: an element's value is copied, directly or through one rank of the node that passes it on, and
never computed. A mapping to nodes changes by which way it comes.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from late_messages import LateMessages
from ranks import run_ranks
from sweeps import WEEKLY
from transition_cases import CASES, Case

from megatron_rl.hybrid_engine import schedule
from megatron_rl.hybrid_engine.allgather_pp import AllGatherPPModel
from megatron_rl.hybrid_engine.exchange import Transport
from megatron_rl.hybrid_engine.plan import ExchangePlan
from megatron_rl.parallel.sharding import LogicalTensor, Shard, box_index, shard_of

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

EXHAUSTIVE = pytest.mark.exhaustive
MESSAGES = ((32 << 20, 1 << 20), (64 << 10, 256))
"""(scratch memory in bytes, elements from which a run is a message of its own): few long messages, and many short."""


def mappings(world_size: int) -> Iterator[list[int]]:
    """The node of each rank: equal nodes of every size, their ranks beside one another or dealt out in turn."""
    for per_node in range(world_size, 0, -1):
        if world_size % per_node == 0:
            yield [rank // per_node for rank in range(world_size)]
            if 1 < per_node < world_size:
                yield [rank % (world_size // per_node) for rank in range(world_size)]


def lacking_bytes(plan: ExchangePlan, member: int) -> int:
    """What the member's node needs of float32 weights and no rank of the group holds there: from masks, not pieces."""
    here = [other for other in plan.members if other.node == plan.members[member].node]
    count = 0
    for name, tensor in plan.tensors.items():
        held = [slot.shard for other in here for slot in other.held if slot.name == name]
        lacking = covered(tensor, [shard_of(tensor, other.wanted) for other in here])
        for needed, having in zip(lacking, covered(tensor, held), strict=True):
            count += int((needed & ~having).sum())
    return 4 * count


def covered(tensor: LogicalTensor, shards: list[Shard]) -> list[torch.Tensor]:
    """For each segment which of its elements lie in one of the shards."""
    masks = [torch.zeros(segment.shape, dtype=torch.bool) for segment in tensor.segments]
    for part in (part for shard in shards for part in shard.parts):
        masks[part.segment][box_index(part.box)] = True
    return masks


class Mapped:
    """A rank's actor, whose weights are gathered again and again as if its ranks sat on other nodes."""

    def __init__(self, config) -> None:
        from megatron_rl.model.families import VOCAB_PADDING
        from megatron_rl.parallel.rank_grid import RolloutGrid
        from megatron_rl.roles.flat_parameters import flat_parameters
        from megatron_rl.roles.host import RankHost

        worker = RankHost(config)
        worker.build("actor")
        source = worker.roles["actor"].source
        grid = RolloutGrid(worker.groups.grid, config.actor_rollout_ref.rollout.tensor_model_parallel_size)
        wanted = grid.place(worker.groups.rank, VOCAB_PADDING)
        self.group, self.rank = worker.groups.exchange_group, worker.groups.rank
        self.own = flat_parameters(worker.roles["actor"].base, worker.groups, source.place, wanted, node=0)
        self.tensors = {spec.tensor.name: spec.tensor for spec in source.model.specs.values()}
        self.drop_train_weights = config.actor_rollout_ref.rollout.drop_train_weights

    def gather(self, nodes: list[int], transport: Transport, bucket_bytes: int) -> tuple[AllGatherPPModel, dict]:
        """The weights' plan, and copies of all rollout shards after a verified gather."""
        weights = AllGatherPPModel(
            replace(self.own, member=replace(self.own.member, node=nodes[self.rank])),
            self.tensors,
            transport,
            bucket_bytes=bucket_bytes,
            drop_train_weights=self.drop_train_weights,
        )
        received = weights.gather()
        assert received == weights.lower_bound
        weights.verify()
        copies = {name: tensor.clone() for name, tensor in weights.tensors.items()}
        weights.release()
        return weights, copies


def mapping_rank(config, nodes_of: list[list[int]], seeds: range) -> list[dict]:
    """For each mapping, messages and seed: whether every rollout shard came out as on one node, and the bytes."""
    mapped, found = Mapped(config), []
    _, expected = mapped.gather([0] * dist.get_world_size(), Transport(mapped.group), MESSAGES[0][0])
    for nodes, (bucket_bytes, direct_numel), seed in itertools.product(nodes_of, MESSAGES, seeds):
        transport = LateMessages(mapped.group, seed)
        with mock.patch.object(schedule, "DIRECT_NUMEL", direct_numel):
            weights, copies = mapped.gather(nodes, transport, bucket_bytes)
        node, first_rank = nodes[mapped.rank], min(member.rank for member in weights.plan.members)
        found.append(
            {
                "is_equal": all(torch.equal(expected[name], copies.pop(name)) for name in expected) and not copies,
                "node": (first_rank, node),
                "network": sum(
                    transport.received_from[number]
                    for number, member in enumerate(weights.plan.members)
                    if member.node != node
                ),
                "lacking": lacking_bytes(weights.plan, weights.number),
            }
        )
    return found


def check(case: Case, tmp_path, seeds: range) -> None:
    config = case.config(case.save(tmp_path / "model", **case.model))
    nodes_of = list(mappings(case.world_size))
    ranks = run_ranks(case.world_size, mapping_rank, config, nodes_of, seeds, timeout=600)
    assert len(ranks[0]) == len(nodes_of) * len(MESSAGES) * len(seeds)
    for runs in zip(*ranks, strict=True):
        assert all(run["is_equal"] for run in runs)
        came: dict[tuple[int, int], int] = defaultdict(int)
        for run in runs:
            came[run["node"]] += run["network"]
        assert all(came[run["node"]] == run["lacking"] for run in runs)


def of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def test_nodes_change_the_way_of_weights_and_nothing_else(tmp_path) -> None:
    """Every mapping of the ranks of TP2xPP2 to nodes: the shards of one node, bit for bit, however late messages are.

    What a node lacks crosses to it once, counted where messages are received. Would not catch what only a real
    network does; runs over two Ray nodes are in tests/e2e.
    """
    check(of("TP2PP2-TP2"), tmp_path, seeds=range(2))


SWEPT = (
    "TP4-TP2",
    "TP2PP2DP2-TP1",
    "TP2PP2VPP2-TP1",
    "TP2PP2-TP1-dropping",
    "TP3-TP1-other-padding",
    "TP2DP2EP2ETP2-TP1",
    "TP2PP2ETP2-TP1-qwen2-moe",
    "PP2DP2EP2-TP2EP2",
    "PP2-DP2EP2",
)
"""A layout for each way to cut: the plan of the others is in tests/hybrid_engine, their bytes in test_scenarios.py."""
REST = [case for case in CASES if case.name != "TP2PP2-TP2"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=EXHAUSTIVE if case.name in SWEPT else WEEKLY, id=case.name) for case in REST]
)
def test_every_layout_on_every_mapping(case, tmp_path) -> None:
    """Every mapping of ranks to nodes, for all layouts of the transition tests: the shards of one node, bit for bit.

    Would not catch what only a real network does.
    """
    check(case, tmp_path, seeds=range(2))
