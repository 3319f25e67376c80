"""A driver on a node of Ray's own making that is told of four GPUs; prints what ranks see, as JSON.

Two worlds of two ranks at a time: the ranks of one see their own GPU each, those of the other, a replica, their
world's.
"""

import json
import os
from contextlib import ExitStack

import ray

from megatron_rl.cluster.pool import ProcessPool
from megatron_rl.cluster.pool_options import PoolOptions
from megatron_rl.cluster.ranks import ReplicaRanks
from megatron_rl.cluster.ray_launcher import RayLauncher
from megatron_rl.config.roles import PoolSize
from megatron_rl.dispatch import Coordinates, Dispatch, remote_method


class EveryRank:
    """A rank whose data no other has."""

    @remote_method(Dispatch.ONE_TO_ALL)
    def coordinates(self) -> Coordinates:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return Coordinates(rank, rank, size, True, rank, size, True)

    @remote_method(Dispatch.ONE_TO_ALL)
    def seen(self) -> list[str]:
        """In a call of its own, after the one that has built it."""
        return [os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_RANK"]]


def main() -> None:
    """No GPU is there, and nobody uses one."""
    ray.init(address="local", num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False)
    try:
        size = PoolSize(1, 2)
        with (
            RayLauncher(4, "cuda") as launcher,
            launcher.reserve(size) as whole,
            launcher.reserve(size) as cut,
            ExitStack() as opened,
        ):
            worlds = [(whole, PoolOptions()), (ReplicaRanks("toys/0", cut, 0, 2), PoolOptions(sees_node=True))]
            pools = [opened.enter_context(ProcessPool("toys", ranks, EveryRank, options=how)) for ranks, how in worlds]
            print(json.dumps([pool.host(EveryRank).seen().get() for pool in pools]))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
