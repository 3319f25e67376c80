"""A driver on a Ray that is told of four GPUs: one of two ranks reports a broken GPU, then three start without it."""

import json

import ray
from fragile_worker import FragileWorker

from megatron_rl.cluster.pool import ProcessPool
from megatron_rl.cluster.ray_launcher import RayLauncher
from megatron_rl.config.roles import PoolSize
from megatron_rl.errors import WorkerFailure


def main() -> None:
    """Print the broken GPU, those of three later ranks, and what four ranks lack before and after it is taken back."""
    ray.init(address="local", num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False)
    try:
        with RayLauncher(4, "cuda") as launcher:
            try:
                with launcher.reserve(PoolSize(1, 2)) as ranks, ProcessPool("t", ranks, FragileWorker) as pool:
                    pool.host(FragileWorker).gpu_of(1, "uncorrectable ECC error encountered").get()
            except WorkerFailure as failure:
                fault = failure.device_fault
            launcher.leave_out(fault.node, fault.gpu)
            with launcher.reserve(PoolSize(1, 3)) as ranks, ProcessPool("t", ranks, FragileWorker) as pool:
                later = pool.host(FragileWorker).gpu_of(-1, "").get()
            missing = shortage_of_four(launcher)
            launcher.take_back()
            print(json.dumps([fault.gpu, later, missing, shortage_of_four(launcher)]))
    finally:
        ray.shutdown()


def shortage_of_four(launcher: RayLauncher) -> str:
    """As recovery asks: again while the node's agent is starting."""
    while "does not respond" in (missing := launcher.shortage([PoolSize(1, 4)])):
        pass
    return missing


if __name__ == "__main__":
    main()
