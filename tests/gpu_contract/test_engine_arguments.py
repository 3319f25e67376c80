"""The arguments of `LLM` on CUDA, put into the installed vLLM's own functions. Nothing here has run on a GPU."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.config.rollout_keys import RolloutConfig
from megatron_rl.model.parts import GroupedAttention
from megatron_rl.roles.environment import worker_environment
from megatron_rl.rollout.arguments import compilation, engine_arguments

pytestmark = pytest.mark.timeout(120)

GIB = 1 << 30

PLAIN = GroupedAttention(64, num_heads=4, num_kv_heads=2, head_size=16)


def on_gpu(total_gib: int, free_gib: float) -> Any:
    """What vLLM measures of a GPU before it builds anything."""
    return SimpleNamespace(total_memory=total_gib * GIB, free_memory=int(free_gib * GIB), device_="cuda:0")


def custom_all_reduce(arguments: dict[str, Any]) -> bool:
    """Whether they leave vLLM its own all-reduce; its configuration on a CPU never does."""
    from vllm.engine.arg_utils import EngineArgs

    return not EngineArgs(**arguments).disable_custom_all_reduce


def test_vllms_own_all_reduce_is_the_users_choice() -> None:
    """Would not catch GPUs that cannot reach each other's memory, which vLLM itself looks at."""
    asked = RolloutConfig(disable_custom_all_reduce=False)
    assert custom_all_reduce(engine_arguments("cuda", "gpt2", asked, 64, "bfloat16", 1, {}, PLAIN)) is True


def test_only_cuda_has_arguments_of_its_own(cuda_arguments: dict[str, Any]) -> None:
    """The CPU has a block size, CUDA vLLM's own. Would not catch one that both need and neither has."""
    on_cpu = engine_arguments("cpu", cuda_arguments["model"], RolloutConfig(), 64, "bfloat16", 1, {}, PLAIN)
    own = {"gpu_memory_utilization", "disable_custom_all_reduce", "moe_backend", "worker_cls"}
    own |= {"compilation_config", "additional_config"}
    assert set(cuda_arguments) - set(on_cpu) == own
    assert set(on_cpu) - set(cuda_arguments) == {"block_size"}
    assert on_cpu["async_scheduling"] is cuda_arguments["async_scheduling"] is False


def test_vllm_takes_every_argument(cuda_arguments: dict[str, Any], vllm_config: Any) -> None:
    """And it means what we mean. Would not catch a value that only vLLM's CUDA platform changes afterwards."""
    assert vllm_config.cache_config.kv_cache_memory_bytes == cuda_arguments["kv_cache_memory_bytes"]
    assert custom_all_reduce(cuda_arguments) is False and vllm_config.parallel_config.disable_custom_all_reduce
    assert vllm_config.kernel_config.moe_backend == "triton"
    assert vllm_config.scheduler_config.async_scheduling is False
    assert vllm_config.model_config.enforce_eager is True


def test_compiled_code_of_two_places_in_a_tp_group_is_kept_apart(
    cuda_arguments: dict[str, Any], vllm_config_of: Callable[[dict[str, Any]], Any]
) -> None:
    """Their keys differ, and are equal for one place. Without `tp_rank` both would have one. Would not catch code that
    depends on more than the place.
    """
    keys = [vllm_config_of(cuda_arguments | {"additional_config": {"tp_rank": n}}).compute_hash() for n in (0, 0, 1)]
    assert keys[0] == keys[1] != keys[2]
    plain = {name: value for name, value in cuda_arguments.items() if name != "additional_config"}
    assert vllm_config_of(plain).compute_hash() == vllm_config_of(plain).compute_hash()


def test_graphs_stop_at_the_sequences_that_run_together(
    cuda_arguments: dict[str, Any], vllm_config_of: Callable[[dict[str, Any]], Any]
) -> None:
    """And all-reduces are not fused with norms unless the user wants vLLM's own. Would not catch a pass of another
    name.
    """
    config = RolloutConfig(enforce_eager=False, max_num_seqs=24)
    compiled = compilation(config)
    assert compiled == {"max_cudagraph_capture_size": 24, "pass_config": {"fuse_allreduce_rms": False}}
    assert "pass_config" not in compilation(RolloutConfig(disable_custom_all_reduce=False))
    taken = vllm_config_of(cuda_arguments | {"compilation_config": compiled}).compilation_config
    assert taken.pass_config.fuse_allreduce_rms is False


@pytest.mark.parametrize("free_gib", [120, 20, 1])
def test_a_gpu_that_the_trainer_fills_is_enough(vllm_config: Any, free_gib: float) -> None:
    """vLLM asks for free memory whatever the cache's size. Would not catch a GPU that runs out afterwards."""
    from vllm.v1.worker.utils import request_memory

    assert request_memory(on_gpu(140, free_gib), vllm_config.cache_config) < GIB


def test_vllms_own_share_would_not_be_enough(
    cuda_arguments: dict[str, Any], vllm_config_of: Callable[[dict[str, Any]], Any]
) -> None:
    """What the tests above are for: 92% of 140 GiB are more than 120. Would not catch another default."""
    from vllm.v1.worker.utils import request_memory

    without = {name: value for name, value in cuda_arguments.items() if name != "gpu_memory_utilization"}
    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        request_memory(on_gpu(140, 120), vllm_config_of(without).cache_config)


def test_the_worker_asks_for_memory_and_switches_all_reduce() -> None:
    """`request_memory` and `set_custom_all_reduce` are what a CUDA worker calls. Read, not run."""
    from vllm.v1.worker import gpu_worker

    calls = {
        node.func.id: ast.unparse(node)
        for node in ast.walk(ast.parse(inspect.getsource(gpu_worker)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert "self.cache_config" in calls["request_memory"]
    assert calls["set_custom_all_reduce"] == "set_custom_all_reduce(not parallel_config.disable_custom_all_reduce)"


@pytest.fixture
def all_reducers(monkeypatch: pytest.MonkeyPatch, cuda_platform: type) -> Callable[[bool], set[str]]:
    """Which of vLLM's own all-reduces a TP group of two gets, with or without the custom one; none is really built."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import (
        cuda_communicator,
        custom_all_reduce,
        flashinfer_all_reduce,
        pynccl,
        symm_mem,
    )

    built: set[str] = set()

    def stand_in(name: str) -> type:
        def build(self: Any, *args: Any, **kwargs: Any) -> None:
            built.add(name)
            self.disabled = False

        return type(name, (), {"__init__": build})

    monkeypatch.setattr(cuda_communicator, "current_platform", cuda_platform())
    monkeypatch.setattr(cuda_communicator.CudaCommunicator, "_log_all_reduce_backend_selection", lambda self: None)
    for module, name in (
        (custom_all_reduce, "CustomAllreduce"),
        (flashinfer_all_reduce, "FlashInferAllReduce"),
        (symm_mem, "SymmMemCommunicator"),
        (pynccl, "PyNcclCommunicator"),
    ):
        monkeypatch.setattr(module, name, stand_in(name))

    def build(custom: bool) -> set[str]:
        monkeypatch.setattr(parallel_state, "_ENABLE_CUSTOM_ALL_REDUCE", None)
        parallel_state.set_custom_all_reduce(custom)
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        try:
            group = dist.group.WORLD
            cuda_communicator.CudaCommunicator(group, torch.device("cpu"), group, unique_name="tp:0")
        finally:
            dist.destroy_process_group()
        return built

    return build


def test_tensor_parallel_groups_all_reduce_over_nccl_alone(
    all_reducers: Callable[[bool], set[str]], cuda_arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With our argument and our environment. Would not catch what NCCL itself does between two processes."""
    for name, value in worker_environment("cuda", ranks_per_node=2).items():
        if name.startswith("VLLM_ALLREDUCE"):
            monkeypatch.setenv(name, value)
    assert all_reducers(custom_all_reduce(cuda_arguments)) == {"PyNcclCommunicator"}


def test_by_default_they_would_reach_for_each_others_gpus(
    all_reducers: Callable[[bool], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above is for; where a process sees one GPU, the table of pairs has no second one."""
    from vllm.distributed.device_communicators import all_reduce_utils

    assert all_reducers(True) == {
        "PyNcclCommunicator",
        "CustomAllreduce",
        "FlashInferAllReduce",
        "SymmMemCommunicator",
    }
    monkeypatch.setattr(all_reduce_utils, "_gpu_p2p_access_cache", {"0->0": True})
    with pytest.raises(KeyError, match="0->1"):
        all_reduce_utils.gpu_p2p_access_check(0, 1)


def moe_layer(moe_backend: str) -> Any:
    """vLLM's description of one layer of 4 experts on one GPU."""
    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )

    return FusedMoEConfig(
        num_experts=4,
        experts_per_token=2,
        hidden_dim=256,
        intermediate_size=128,
        num_local_experts=4,
        num_logical_experts=4,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
        moe_backend=moe_backend,
    )


def chosen(moe_backend: str) -> tuple[str, bool]:
    """The backend of experts, and whether it reads the weights where they lie; of FlashInfer's first only the name."""
    import torch
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    layer = moe_layer(moe_backend)
    backend, _ = unquantized.select_unquantized_moe_backend(layer)
    if backend is unquantized.UnquantizedMoeBackend.FLASHINFER_TRTLLM:
        return backend.value, False
    w13, w2 = torch.randn(4, 256, 256, dtype=torch.bfloat16), torch.randn(4, 256, 128, dtype=torch.bfloat16)
    before = w13.clone(), w2.clone()
    ready = unquantized.convert_to_unquantized_kernel_format(backend, layer, w13, w2)
    same = all(one.data_ptr() == other.data_ptr() for one, other in zip(ready, (w13, w2), strict=True))
    return backend.value, same and all(torch.equal(*pair) for pair in zip(before, (w13, w2), strict=True))


@pytest.mark.parametrize("major", [9, 10])
def test_experts_are_read_where_the_trainer_has_them(
    pretend_gpu: Callable[[int], None], vllm_config: Any, major: int
) -> None:
    """On Hopper and Blackwell, same storage and same content. Would not catch a kernel that fails on a real GPU."""
    pretend_gpu(major)
    assert chosen(vllm_config.kernel_config.moe_backend) == ("TRITON", True)


def test_vllms_own_choice_would_not_share_experts_on_blackwell(pretend_gpu: Callable[[int], None]) -> None:
    """What the test above is for. On Hopper vLLM takes Triton by itself."""
    pretend_gpu(9)
    assert chosen("auto") == ("TRITON", True)
    pretend_gpu(10)
    assert chosen("auto") == ("FlashInfer TRTLLM", False)
    assert chosen("flashinfer_cutlass") == ("FlashInfer CUTLASS", False)
