"""Limits of the kernels of vLLM, which would fail only when it is built or generates.

Read from the installed version (0.32) by trying its kernels, and compared with them again by
`tests/rollout/test_engine_limits.py`: vLLM itself is too slow to import for rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.planning.folder_checks import ModelSizes

DTYPE = "actor_rollout_ref.actor.megatron.dtype"
CPU_TP_SIZES = (1, 2, 3, 4, 8)
"""Numbers of ranks for which its all-reduce in shared memory works."""


def engine_tp_sizes(device: str, sizes: Sequence[int]) -> list[int]:
    """The TP sizes in `sizes` that the engine supports on a device."""
    return [size for size in sizes if device != "cpu" or size in CPU_TP_SIZES]


def engine_problems(config: RunConfig, models: Sequence[ModelSizes]) -> Iterable[Violation]:
    """The actor's attention against the kernels of the device. `layout_rules` checks rollout TP."""
    key, path, device = "actor_rollout_ref.model.path", config.actor_rollout_ref.model.path, config.trainer.device
    model = next((model for model in models if model.path == path), None)
    parts = model.parts.attentions if model is not None and model.even_heads else ()
    problems = dict.fromkeys(problem for part in parts if (problem := part.engine_problem(device)) is not None)
    for subject, rule in problems:
        yield Violation({key: path}, rule, hint="take another model", subject=f"{subject} of {path}")
    dtype = config.actor_rollout_ref.actor.megatron.dtype
    if model is not None and dtype in model.attention.copied_dtypes(device):
        rule = f"is not supported for {path}: vLLM on trainer.device={device} would keep a copy of its weights"
        yield Violation({DTYPE: dtype}, rule, {DTYPE: "bfloat16"})
