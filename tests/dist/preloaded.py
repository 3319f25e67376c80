"""What a rank imports, for the server that ranks are forked from: imported once instead of 5 s in each of them."""

from __future__ import annotations

import importlib

from vllm.platforms import current_platform

from megatron_rl.cluster.loading import without_collections
from megatron_rl.roles.preloaded import preloaded

MODULES = (
    *preloaded("cpu", generates=True),
    "megatron_rl.cli",
    "megatron_rl.cluster.in_process",
    "megatron_rl.observe.tensorboard",
    "megatron_rl.train",
    "pytest",
    "ranks",
    "tiny_models",
    "torch.nested._internal.ops",
    "transformers.models.qwen2.tokenization_qwen2",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.quantization.online.fp8",
    "vllm.model_executor.layers.utils",
)
"""Of ranks, and of commands in a child of this server (`tests/e2e/forked_run.py`)."""

# What is there at the end is not looked at again either: vLLM collects three times when an engine starts.
with without_collections():
    for module in MODULES:
        importlib.import_module(module)

# Without Triton vLLM replaces kernels in every module that has them, and looks through all modules whenever an engine
# starts. What is replaced in this process is so in its ranks, so there is nothing left to look for in them.
current_platform.register_triton_kernel_overrides()
type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
