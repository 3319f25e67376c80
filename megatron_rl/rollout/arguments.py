"""Arguments of vLLM on CPU and on CUDA. Pure, so that CUDA's arguments can be tested without a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_rl.config.rollout_keys import EARLIER, MTP, RolloutConfig
from megatron_rl.model.parts import Attention
from megatron_rl.rollout.kv_cache import POOL, POOL_OPTION

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LOAD_FORMAT = "megatron_rl_shared"
"""The name under which vLLM knows the loader of `shared_weights.py`."""

PROPOSER = "megatron_rl.rollout.earlier_proposer.EarlierProposer"
"""What makes draft tokens from earlier responses; vLLM builds it."""

GATED_DELTA = {"gdn_prefill_backend": "triton"}
"""vLLM's kernels of the gated delta rule. Its own choice on Hopper, FlashInfer's, is compiled by nvcc."""

FEATURES = {"limit_mm_per_prompt": {"image": 0}, "enable_mm_embeds": True, "mm_processor_cache_gb": 0}
"""Further arguments where requests have images: features instead of pixels, kept in vLLM's encoder cache alone."""

LEAST_UTILIZATION = 1e-6
"""Share of a GPU that vLLM requires to be free. It accepts no zero."""


def engine_arguments(
    device_kind: str,
    model_path: str,
    config: RolloutConfig,
    max_model_len: int,
    dtype: str,
    seed: int,
    hf_overrides: dict[str, Any],
    attention: Attention,
    returns_experts: bool = False,
    tp_rank: int = 0,
    text_only: bool = False,
) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`. device_kind: "cpu" or "cuda"; the others: see `RolloutEngine`.

    tp_rank: this rank's place in its rollout TP group. text_only: build the language model of a larger one alone.
    """
    arguments: dict[str, Any] = {
        "model": model_path,
        "load_format": LOAD_FORMAT,
        "dtype": dtype,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        **experts_on_ranks(config),
        "distributed_executor_backend": "external_launcher",
        "enforce_eager": config.enforce_eager,
        "skip_tokenizer_init": True,
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "async_scheduling": config.async_scheduling,
        "seed": seed,
        "hf_overrides": hf_overrides,
        "prefix_match_unit": config.prefix_match_unit,
        # Layers with a window would share cache tensors with other layers, and the cache could not be released.
        "disable_hybrid_kv_cache_manager": True,
        "enable_return_routed_experts": returns_experts,
    }
    arguments |= {**draft_arguments(config), **attention.engine_arguments}
    arguments |= beside_drafts(config, device_kind in attention.whole_prompts, max_model_len, hf_overrides)
    arguments |= {"language_model_only": True} if text_only else {}
    if device_kind == "cpu":
        # vLLM's default is 128. A block holds tokens of one response only, and samples of a group share whole blocks of
        # their prompt.
        arguments["block_size"] = attention.block_sizes["cpu"]
        arguments |= attention.cpu_engine_arguments
    else:
        arguments |= {
            # vLLM compares it with free memory even if the cache size is given, and the trainer holds much memory.
            "gpu_memory_utilization": LEAST_UTILIZATION,
            # Custom all-reduce finds the other ranks' GPUs by index; with it ranks see all GPUs of their node.
            "disable_custom_all_reduce": config.disable_custom_all_reduce,
            # Other expert kernels reorder the weights, in the trainer's memory or in a copy that becomes stale.
            "moe_backend": "triton",
            # The KV cache is released between generations and must keep the addresses in captured graphs.
            "worker_cls": "megatron_rl.rollout.cuda_worker.StableWorker",
            "compilation_config": compilation(config),
            # A part of the key under which vLLM keeps compiled code. Without it the key has the rank in the world, and
            # code for one place in a TP group, with its bounds of the vocabulary, would run in another.
            "additional_config": {"tp_rank": tp_rank, **GATED_DELTA},
        }
    return arguments


def experts_on_ranks(config: RolloutConfig) -> dict[str, Any]:
    """Whether ranks have whole experts, and the TP groups of a replica that share them."""
    return {"enable_expert_parallel": config.expert_parallel_size > 1, "data_parallel_size": config.attention_dp_size}


def with_cache_pool(arguments: dict[str, Any], tag: str) -> dict[str, Any]:
    """Return arguments of an engine whose KV cache has this tag on CUDA; with vLLM's own tag they stay as they are."""
    if tag == POOL or "worker_cls" not in arguments:
        return arguments
    return arguments | {"additional_config": arguments["additional_config"] | {POOL_OPTION: tag}}


def beside_drafts(
    config: RolloutConfig, whole_prompts: bool, max_model_len: int, hf_overrides: dict[str, Any]
) -> dict[str, Any]:
    """Other arguments that drafts change. whole_prompts: vLLM reads every prompt in one step."""
    changed: dict[str, Any] = {}
    if config.speculative is not None and whole_prompts:
        # vLLM makes room for a whole prompt by itself, and with drafts so late that a longer one waits for ever.
        changed["max_num_batched_tokens"] = max(config.max_num_batched_tokens, max_model_len)
    if config.speculative == MTP:
        # vLLM builds the layer from the folder's settings too, and asks a function for them, not a dict.
        changed["hf_overrides"] = partial(with_settings, hf_overrides)
    return changed


def with_settings(settings: Mapping[str, Any], hf_config: PretrainedConfig) -> PretrainedConfig:
    """Put settings into a configuration of transformers, and return it."""
    hf_config.update(dict(settings))
    return hf_config


def compilation(config: RolloutConfig) -> dict[str, Any]:
    """What vLLM compiles and captures on CUDA: graphs up to the sequences that run together, and all-reduces of NCCL.

    With TP on Hopper vLLM would fuse all-reduce and norm in a kernel that reaches for the other ranks' GPUs.
    """
    captured = {} if config.enforce_eager else {"max_cudagraph_capture_size": config.max_num_seqs}
    passes = {"pass_config": {"fuse_allreduce_rms": False}} if config.disable_custom_all_reduce else {}
    return captured | passes


def draft_arguments(config: RolloutConfig) -> dict[str, Any]:
    """vLLM's configuration of speculative decoding; none without it.

    The schedule by batch size is given in any case: without it vLLM fills up requests that begin with draft tokens that
    no token can be.
    """
    if config.speculative is None:
        return {}
    most = min(config.speculative_disable_by_batch_size or config.max_num_seqs, config.max_num_seqs)
    schedule = [(1, most, config.num_speculative_tokens)]
    if most < config.max_num_seqs:
        schedule.append((most + 1, config.max_num_seqs, 0))
    drafts: dict[str, Any] = {
        "num_speculative_tokens": config.num_speculative_tokens,
        "num_speculative_tokens_per_batch_size": schedule,
    }
    if config.speculative == EARLIER:
        drafts |= {"method": "custom_class", "model": PROPOSER}
    elif config.speculative == MTP:
        drafts |= {"method": MTP}
    else:
        lookup = {"prompt_lookup_min": config.prompt_lookup_min, "prompt_lookup_max": config.prompt_lookup_max}
        drafts |= {"method": config.speculative} | lookup
    return {"speculative_config": drafts}


def with_adapter(
    arguments: Mapping[str, Any], rank: int, scale: float, names: Iterable[str], num_slots: int = 1
) -> dict[str, Any]:
    """Return the arguments of an engine that reads `num_slots` adapters, too, of `rank` rows and in the weights' dtype.

    names: of its tensors, `model.layers.0.self_attn.q_proj.lora_A`. Other linears have no adapter; vLLM has none for
    experts on CPUs. scale: a constant of compiled code, of which vLLM knows nothing, so that it joins the key.
    """
    projections = sorted({name.split(".")[-2] for name in names})
    slots = {"max_loras": num_slots, "max_cpu_loras": num_slots}
    own = {"max_lora_rank": rank, **slots, "lora_target_modules": projections}
    constants = {**arguments.get("additional_config", {}), "lora_scale": scale}
    return {**arguments, "enable_lora": True, **own, "additional_config": constants}
