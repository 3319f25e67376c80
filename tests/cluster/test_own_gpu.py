"""Which GPU a rank sees. Ray is told of GPUs that are not there and that nobody uses."""

from __future__ import annotations

import os

import pytest
import ray
from toy_worker import ToyWorker

from megatron_rl.cluster.ray_pool import RayPool
from megatron_rl.cluster.resource_pool import ResourcePool

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


def test_every_rank_sees_its_own_gpu_whatever_the_node_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the node asks Ray to hide none, a rank sees one, which is its number 0.

    Would not catch a driver library that numbers GPUs otherwise, nor a process that is started without Ray.
    """
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert not ray.is_initialized() and "RAY_ADDRESS" not in os.environ
    ray.init(address="local", num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False)
    try:
        with ResourcePool(1, 4, "cuda") as ranks, RayPool("toys", ranks, ToyWorker) as pool:
            seen, index = pool.host(ToyWorker).environment("CUDA_VISIBLE_DEVICES", "LOCAL_RANK").get()
            assert seen in ("0", "1", "2", "3") and index == "0"
    finally:
        ray.shutdown()
