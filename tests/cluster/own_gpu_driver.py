"""A driver on a node of Ray's own making that is told of four GPUs; prints what each of four ranks sees, as JSON."""

import json

import ray
from toy_worker import ToyWorker

from megatron_rl.cluster.ray_pool import RayPool
from megatron_rl.cluster.resource_pool import ResourcePool


def main() -> None:
    """No GPU is there, and nobody uses one."""
    ray.init(address="local", num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False)
    try:
        with ResourcePool(1, 4, "cuda") as ranks, RayPool("toys", ranks, ToyWorker) as pool:
            print(json.dumps(pool.host(ToyWorker).environment("CUDA_VISIBLE_DEVICES", "LOCAL_RANK").get()))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
