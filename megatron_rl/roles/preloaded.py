"""Modules that a node imports once, for all ranks that are forked there (`cluster/supervisor.py`)."""

from __future__ import annotations

from third_party_patches import modules_for

PRELOADED = (
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron_rl.checkpoint.hf_export",
    "megatron_rl.roles.host",
    "megatron_rl.roles.role_checkpoint",
    "megatron_rl.roles.token_scorer",
    "megatron_rl.roles.training",
    "omegaconf.grammar_parser",
)
"""Modules that every rank on a CPU imports; some of them late."""

PRELOADED_ENGINE = (
    "megatron_rl.rollout.engine",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
)
"""Where there are engines, for the pools without them, too; some of it vLLM asks for late, by name."""


def preloaded(device: str, generates: bool) -> tuple[str, ...]:
    """Modules that a node imports once for its ranks; none on GPUs, which a forked process cannot use."""
    if device == "cuda":
        return ()
    common = (*PRELOADED, *modules_for(device, generates=False))
    return tuple(dict.fromkeys((*common, *PRELOADED_ENGINE, *modules_for(device)))) if generates else common
