"""Rules of prompts that samples share in part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_rl.config.keys import ROLLOUT
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.planning.model_folder import ModelSizes

UNIT = f"{ROLLOUT}.prefix_match_unit"
RETURNS = f"{ROLLOUT}.enable_rollout_routing_replay"


def shared_prompt_problems(config: RunConfig, models: Sequence[ModelSizes]) -> Iterable[Violation]:
    """Every violation. Constraints report values out of their range."""
    shared, device = config.actor_rollout_ref, config.trainer.device
    given = shared.rollout.prefix_match_unit
    if given is None or given < 1:
        return
    if device != "cpu":
        yield Violation({UNIT: given}, f"needs trainer.device=cpu, and it is {device}: no GPU has run it", {UNIT: None})
        return
    if config.returns_experts:
        rule = (
            "must be null where the engine returns the experts of every token: vLLM keeps those of whole blocks alone"
        )
        yield Violation({UNIT: given}, rule, {UNIT: None})
    model = next((model for model in models if model.path == shared.model.path), None)
    if model is None or model.model is None or device not in model.attention.block_sizes:
        return
    if any(layer.attention.state_bytes(1, 4) for layer in model.parts.kinds):
        yield Violation({UNIT: given}, f"is not supported for layers with states, which {model.path} has", {UNIT: None})
        return
    if why := model.attention.unreplayable.get(device):
        yield Violation({UNIT: given}, f"is not supported for {model.path}: {why}", {UNIT: None})
        return
    size = model.attention.block_sizes[device]
    if size % given:
        nearest = min((unit for unit in range(1, size + 1) if size % unit == 0), key=lambda unit: abs(unit - given))
        yield Violation({UNIT: given}, f"must divide the {size} tokens of a block of the KV cache", {UNIT: nearest})
