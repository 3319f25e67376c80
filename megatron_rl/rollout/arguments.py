"""What vLLM is built with, on CPU and on CUDA. Pure, so that CUDA's arguments can be looked at without a GPU."""

from __future__ import annotations

from typing import Any

from megatron_rl.config.schema import RolloutConfig

LOAD_FORMAT = "megatron_rl_shared"
"""vLLM's name for our way to build its models: `shared_weights.py`."""

LEAST_UTILIZATION = 1e-6
"""Of a GPU, what vLLM may ask to be free: as good as nothing. It allows itself no zero."""

CPU_BLOCK_SIZE = 32
"""Tokens of one block of the KV cache on CPU, where vLLM itself takes 128. A block holds one answer's tokens only, and
the samples of a group share whole blocks of their prompt. The kernel takes multiples of 32.
"""


LATENT_CPU_BLOCK_SIZE = 16
"""The same for latent attention, whose kernel on CPU takes no other."""


def engine_arguments(
    device_kind: str,
    model_path: str,
    config: RolloutConfig,
    max_model_len: int,
    dtype: str,
    seed: int,
    hf_overrides: dict[str, Any],
    returns_experts: bool = False,
    is_latent: bool = False,
) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`. device_kind: "cpu" or "cuda"; the rest as of `RolloutEngine`."""
    arguments: dict[str, Any] = {
        "model": model_path,
        "load_format": LOAD_FORMAT,
        "dtype": dtype,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "distributed_executor_backend": "external_launcher",
        "enforce_eager": config.enforce_eager,
        "skip_tokenizer_init": True,
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        # Slices count steps: none may be under way when weights change. (vLLM never does it on CPU.)
        "async_scheduling": False,
        "seed": seed,
        "hf_overrides": hf_overrides,
        # Layers with a window would share the cache's tensors with layers without: it could not leave and come back.
        "disable_hybrid_kv_cache_manager": True,
        "enable_return_routed_experts": returns_experts,
    }
    if device_kind == "cpu":
        arguments["block_size"] = LATENT_CPU_BLOCK_SIZE if is_latent else CPU_BLOCK_SIZE
        if is_latent:
            # Where the CPU has matrix tiles, another backend would pack copies of the weights and drop the trainer's.
            arguments["attention_backend"] = "CPU_MLA"
            # Its kernel on CPU turns other elements than it should where pairs lie side by side in several heads.
            arguments["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
    else:
        arguments |= {
            # Compared with what is free even where the size of the cache is given, and the trainer holds much already.
            "gpu_memory_utilization": LEAST_UTILIZATION,
            # It looks the other ranks' GPUs up by their index: where it is on, ranks see those of their node.
            "disable_custom_all_reduce": config.disable_custom_all_reduce,
            # Other kernels of experts reorder the weights: in the trainer's memory, or in a copy that goes stale.
            "moe_backend": "triton",
            # Its KV cache leaves between generations, and captured graphs have noted where it lies.
            "worker_cls": "megatron_rl.rollout.cuda_worker.StableWorker",
        }
    return arguments
