"""What the contract tests share: vLLM's own configuration from our arguments, and its platform taken for a GPU's."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
from tiny_models import save_qwen3_moe

MODULES_WITH_PLATFORM = (
    "vllm.model_executor.layers.fused_moe.oracle.unquantized",
    "vllm.model_executor.layers.fused_moe.experts.triton_moe",
    "vllm.model_executor.layers.fused_moe.experts.trtllm_bf16_moe",
    "vllm.model_executor.layers.fused_moe.experts.flashinfer_cutlass_moe",
    "vllm.model_executor.layers.fused_moe.config",
)


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Qwen3-MoE."""
    return save_qwen3_moe(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="session")
def cuda_arguments(moe_folder: str) -> dict[str, Any]:
    """What `LLM` is called with on CUDA, for a rollout of one rank in bfloat16."""
    from megatron_rl.checkpoint.model_folder import ModelFolder
    from megatron_rl.config.rollout_keys import RolloutConfig
    from megatron_rl.rollout.arguments import engine_arguments

    config, attention = RolloutConfig(tensor_model_parallel_size=1), ModelFolder(moe_folder).model.attention
    return engine_arguments("cuda", moe_folder, config, 64, "bfloat16", 1, {}, attention)


@pytest.fixture(scope="session")
def vllm_config_of() -> Callable[[dict[str, Any]], Any]:
    """vLLM's configuration as it makes it from arguments of `LLM`, on this machine's platform."""
    from vllm.engine.arg_utils import EngineArgs

    from megatron_rl.rollout.shared_weights import register_shared_loader

    register_shared_loader({})
    return lambda arguments: EngineArgs(**arguments).create_engine_config()


@pytest.fixture(scope="session")
def vllm_config(cuda_arguments: dict[str, Any], vllm_config_of: Callable[[dict[str, Any]], Any]) -> Any:
    return vllm_config_of(cuda_arguments)


@pytest.fixture(scope="session")
def cuda_platform() -> type:
    """vLLM's platform of a CUDA machine; its module wants compiled kernels to be registered, which are not here."""
    sys.modules.setdefault("vllm._C_stable_libtorch", types.ModuleType("vllm._C_stable_libtorch"))
    return importlib.import_module("vllm.platforms.cuda").CudaPlatformBase


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch, cuda_platform: type) -> Callable[[int], None]:
    """Called with 9 or 10, lets vLLM choose kernels for experts as on a Hopper or a Blackwell GPU with FlashInfer."""
    from vllm.platforms.interface import DeviceCapability

    def pretend(major: int) -> None:
        class Pretended(cuda_platform):
            @classmethod
            def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
                return DeviceCapability(major, 0)

        for name in MODULES_WITH_PLATFORM:
            module = importlib.import_module(name)
            if hasattr(module, "current_platform"):
                monkeypatch.setattr(module, "current_platform", Pretended())
        for name, has in (
            ("trtllm_bf16_moe", "has_flashinfer_trtllm_fused_moe"),
            ("flashinfer_cutlass_moe", "has_flashinfer_cutlass_fused_moe"),
        ):
            module = importlib.import_module(f"vllm.model_executor.layers.fused_moe.experts.{name}")
            monkeypatch.setattr(module, has, lambda: True)

    return pretend
