"""A driver on a node of Ray's own making that is told of four GPUs; prints what ranks see, as JSON.

Four ranks that see their own GPU each; then two worlds of two ranks that see those of their world.
"""

import json
import os
from contextlib import ExitStack

import ray

from megatron_rl.cluster.ranks import Ranks, ReplicaRanks
from megatron_rl.cluster.ray_pool import PoolOptions, RayPool
from megatron_rl.cluster.resource_pool import ResourcePool
from megatron_rl.dispatch import Coordinates, Dispatch, verb


class EveryRank:
    """A rank whose data no other has."""

    @verb(Dispatch.ONE_TO_ALL)
    def coordinates(self) -> Coordinates:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return Coordinates(rank, rank, size, True, rank, size, True)

    @verb(Dispatch.ONE_TO_ALL)
    def seen(self) -> list[str]:
        """In a call of its own, after the one that has built it."""
        return [os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_RANK"]]


def seen_by(worlds: list[Ranks], options: PoolOptions) -> list[list[list[str]]]:
    """Of every rank of worlds that run at the same time: the GPUs that it sees, and the number of its own."""
    with ExitStack() as opened:
        pools = [opened.enter_context(RayPool("toys", world, EveryRank, options=options)) for world in worlds]
        return [pool.host(EveryRank).seen().get() for pool in pools]


def main() -> None:
    """No GPU is there, and nobody uses one."""
    ray.init(address="local", num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False)
    try:
        with ResourcePool(1, 4, "cuda") as ranks:
            print(json.dumps(seen_by([ranks], PoolOptions())))
            halves: list[Ranks] = [ReplicaRanks(f"toys/{number}", ranks, number, 2) for number in range(2)]
            print(json.dumps(seen_by(halves, PoolOptions(sees_node=True))))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
