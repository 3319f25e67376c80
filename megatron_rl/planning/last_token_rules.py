"""Rules of prompts that samples share in part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_rl.config.keys import ROLLOUT
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.planning.folder_checks import ModelSizes

UNIT = f"{ROLLOUT}.prefix_match_unit"


def shared_prompt_problems(config: RunConfig, models: Sequence[ModelSizes]) -> Iterable[Violation]:
    """Every violation. Constraints report values out of their range."""
    shared, device = config.actor_rollout_ref, config.trainer.device
    given = shared.rollout.prefix_match_unit
    if given is None or given < 1:
        return
    model = next((model for model in models if model.path == shared.model.path), None)
    if model is None or model.model is None or device not in model.attention.block_sizes:
        return
    has_states = any(layer.attention.state_bytes(1, 4) for layer in model.parts.kinds)
    if has_states or device in model.attention.unreplayable:
        return  # the table of features reports it
    size = model.attention.block_sizes[device]
    if size % given:
        nearest = min((unit for unit in range(1, size + 1) if size % unit == 0), key=lambda unit: abs(unit - given))
        yield Violation({UNIT: given}, f"must divide the {size} tokens of a block of the KV cache", {UNIT: nearest})
