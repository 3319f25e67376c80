"""What a rank imports, for the server that ranks are forked from: imported once instead of 5 s in each of them.

`import vllm` alone loads next to nothing: its parts are named here as an engine on CPU needs them.
"""

from __future__ import annotations

import importlib

from vllm.platforms import current_platform

from megatron_rl.loading import without_collections

MODULES = (
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron_rl.report",
    "megatron_rl.rollout.engine",
    "megatron_rl.roles.host",
    "megatron_rl.roles.role_checkpoint",
    "megatron_rl.roles.token_scorer",
    "megatron_rl.roles.training",
    "omegaconf",
    "omegaconf.grammar_parser",
    "pytest",
    "ranks",
    "tiny_models",
    "torch.nested._internal.ops",
    "vllm.model_executor.layers.utils",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
)

# What is there at the end is not looked at again either: vLLM collects three times when an engine starts.
with without_collections():
    for module in MODULES:
        importlib.import_module(module)

# Without Triton vLLM replaces kernels in every module that has them, and looks through all modules whenever an engine
# starts. What is replaced in this process is so in its ranks, so there is nothing left to look for in them.
current_platform.register_triton_kernel_overrides()
type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
