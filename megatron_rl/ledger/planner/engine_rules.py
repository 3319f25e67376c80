"""Limits of the kernels of vLLM, which would fail only when it is built or generates.

Read from the installed version (0.32) by trying its kernels, and compared with them again by
`tests/rollout/test_engine_limits.py`: vLLM itself is too slow to import for rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.ledger.planner.model_folder import ModelSizes
from megatron_rl.model.families import LatentAttention

CPU_HEAD_SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Elements of an attention head for which there are kernels on CPU. vLLM's own list lacks 48, which it computes."""

CPU_TP_SIZES = (1, 2, 3, 4, 8)
"""Numbers of ranks for which its all-reduce in shared memory works."""

CUDA_HEAD_MULTIPLE, CUDA_LARGEST_HEAD = 8, 256
"""FlashAttention's rule."""


def engine_tp_sizes(device: str, sizes: Sequence[int]) -> list[int]:
    """The TP sizes in `sizes` that the engine supports on a device."""
    return [size for size in sizes if device != "cpu" or size in CPU_TP_SIZES]


CPU_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""The only latent vectors for which there is a kernel on CPU: those of every released DeepSeek-V2 and V3."""


def engine_problems(config: RunConfig, models: Sequence[ModelSizes]) -> Iterable[Violation]:
    """The actor's attention heads against the kernels of the device. `layout_rules` checks rollout TP."""
    key, path = "actor_rollout_ref.model.path", config.actor_rollout_ref.model.path
    model = next((model for model in models if model.path == path), None)
    if model is None or not model.even_heads:
        return
    if model.latent is not None:
        yield from _latent_problems(config, model.latent, key, path)
        return
    size, rule = model.head_size, ""
    if config.trainer.device == "cpu" and size not in CPU_HEAD_SIZES:
        rule = f"must be one of {', '.join(map(str, CPU_HEAD_SIZES))}"
    if config.trainer.device == "cuda" and (size % CUDA_HEAD_MULTIPLE or size > CUDA_LARGEST_HEAD):
        rule = f"must be a multiple of {CUDA_HEAD_MULTIPLE} and <= {CUDA_LARGEST_HEAD}"
    if rule:
        because = f": vLLM has no attention kernel for another on trainer.device={config.trainer.device}"
        yield Violation({key: path}, rule + because, hint="take another model", subject=f"head_dim({size}) of {path}")


def _latent_problems(config: RunConfig, latent: LatentAttention, key: str, path: str) -> Iterable[Violation]:
    """Latent vectors against the kernels on CPU; on CUDA vLLM chooses a kernel by the GPU."""
    given = {"kv_lora_rank": latent.kv_rank, "qk_rope_head_dim": latent.rope}
    if config.trainer.device == "cpu" and given != CPU_LATENT:
        rule = "must be 512 and 64: vLLM has no kernel for other latent vectors on trainer.device=cpu"
        subject = f"kv_lora_rank({latent.kv_rank}) and qk_rope_head_dim({latent.rope}) of {path}"
        yield Violation({key: path}, rule, hint="take another model", subject=subject)
