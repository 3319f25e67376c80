"""How a reservation is cut into replicas: no processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.cluster.in_process import InProcessCluster
from megatron_rl.cluster.local_launcher import LocalLauncher
from megatron_rl.cluster.pool_options import Hosting
from megatron_rl.cluster.process_cluster import ProcessCluster
from megatron_rl.cluster.ranks import ReplicaRanks
from megatron_rl.cluster.ray_launcher import RayRanks
from megatron_rl.cluster.ray_session import RaySession
from megatron_rl.cluster.replicas import parts_of
from megatron_rl.cluster.stale_processes import DRAINS, REPLICA
from megatron_rl.config.roles import PoolSize, PoolSpec


def parts(num_nodes: int, per_node: int, size: int, device: str = "cpu") -> list[ReplicaRanks]:
    whole = RayRanks(PoolSize(num_nodes, per_node), device, RaySession(1))
    return [ReplicaRanks(f"rollout/{n}", whole, n, size) for n in range(whole.world_size // size)]


@pytest.mark.parametrize(
    ("num_nodes", "per_node", "size", "local_ranks", "local_sizes", "per_call"),
    [
        (1, 4, 2, [[0, 1], [0, 1]], [[2, 2], [2, 2]], 2),
        (2, 2, 4, [[0, 1, 0, 1]], [[2, 2, 2, 2]], 2),
        (2, 3, 2, [[0, 1], [0, 0], [0, 1]], [[2, 2], [1, 1], [2, 2]], 1),
        (3, 1, 1, [[0], [0], [0]], [[1], [1], [1]], 1),
        (3, 2, 3, [[0, 1, 0], [0, 0, 1]], [[2, 2, 1], [1, 2, 2]], 1),
    ],
)
def test_places_within_a_replica(
    num_nodes: int, per_node: int, size: int, local_ranks: list, local_sizes: list, per_call: int
) -> None:
    """By hand. Would not catch a reservation whose bundles are not in the order of its ranks."""
    found = parts(num_nodes, per_node, size)
    assert [[one.local_rank(rank) for rank in range(size)] for one in found] == local_ranks
    assert [[one.device_index(rank) for rank in range(size)] for one in found] == local_ranks
    assert [[one.local_world_size(rank) for rank in range(size)] for one in found] == local_sizes
    assert {one.num_ranks_per_node for one in found} == {per_call}
    assert [one.first for one in found] == list(range(0, num_nodes * per_node, size))


def test_every_process_on_a_gpu_sees_its_own_device_only() -> None:
    """Would not catch a cluster that hides no devices."""
    assert [[one.device_index(rank) for rank in range(2)] for one in parts(1, 4, 2, "cuda")] == [[0, 0], [0, 0]]


@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 8))
def test_replicas_share_out_all_ranks(num_nodes: int, per_node: int, size: int) -> None:
    """Each rank once, placed on the bundle of its number. Would not catch wrong variables of a rank."""
    whole = RayRanks(PoolSize(num_nodes, per_node), "cpu", RaySession(1))
    if whole.world_size % size:
        with pytest.raises(ValueError, match=f"{whole.world_size} ranks have no replica 0 of {size} ranks"):
            ReplicaRanks("rollout/0", whole, 0, size)
        with pytest.raises(ValueError, match=f"replicas of {size} ranks do not divide the {whole.world_size} ranks"):
            parts_of("rollout", whole, size)
        return
    found = parts(num_nodes, per_node, size)
    assert [rank for one in found for rank in range(one.first, one.first + size)] == list(range(num_nodes * per_node))
    for number, one in enumerate(found):
        assert one.variables == {
            REPLICA: f"rollout/{number}",
            "POOL_REPLICA": str(number),
            "POOL_REPLICAS": str(len(found)),
            "POOL_FIRST_RANK": str(number * size),
        }
        for rank in range(size):
            mates = [
                other for other in range(size) if (one.first + other) // per_node == (one.first + rank) // per_node
            ]
            assert (one.local_rank(rank), one.local_world_size(rank)) == (mates.index(rank), len(mates))
    with pytest.raises(ValueError, match="ranks have no replica"):
        ReplicaRanks("rollout/x", whole, len(found), size)


def test_a_replica_with_a_reservation_of_its_own() -> None:
    """The third of four replicas, on two nodes of two ranks that are its own: places count from 0, names from 2."""
    own = RayRanks(PoolSize(2, 2), "cpu", RaySession(1))
    part = ReplicaRanks("rollout/2", own, 2, 4, place=0, num_replicas=4, drains=True)
    assert (part.first, [part.local_rank(rank) for rank in range(4)]) == (0, [0, 1, 0, 1])
    names = {REPLICA: "rollout/2", "POOL_REPLICA": "2", "POOL_REPLICAS": "4", "POOL_FIRST_RANK": "8", DRAINS: "1"}
    assert part.variables == names
    assert not part.is_given  # nobody has asked


def test_clusters_refuse_what_they_cannot_replicate() -> None:
    """Before anything is started. Would not catch a pool whose ranks the replicas do not divide, which is later."""
    hosting = Hosting(object, (), {}, "cpu", replicated={"rollout": 1})
    pool = PoolSpec("train", PoolSize(1, 1, "nodes", "ranks"), ())
    with pytest.raises(ValueError, match=r"there are no pools \['rollout'\] to replicate"):
        ProcessCluster(LocalLauncher("cpu"), [pool], hosting)
    with pytest.raises(ValueError, match=r"no pool in this process can be replicated, and \['rollout'\] is to be"):
        InProcessCluster({"train": pool}, hosting)
