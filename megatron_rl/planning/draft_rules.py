"""Rules of `rollout.speculative`: where speculative decoding is supported, and what it needs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence

from megatron_rl.config.drafts import MTP
from megatron_rl.config.keys import ACTOR, ROLLOUT
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.planning.model_folder import ModelSizes

KEY, LEAST = f"{ROLLOUT}.speculative", f"{ROLLOUT}.prompt_lookup_min"
COMPILER = "numba"
"""What the searches for earlier tokens, vLLM's and ours, are compiled with."""
COMPILERS_VERSION = "0.65.0"
"""vLLM's own pin."""


def draft_problems(
    config: RunConfig, models: Sequence[ModelSizes], *, config_only: bool = False
) -> Iterable[Violation]:
    """Every violation. Constraints report unknown names and bounds. config_only: packages need not be installed."""
    shared = config.actor_rollout_ref
    rollout, given = shared.rollout, shared.rollout.speculative
    if given is None:
        return
    if rollout.prompt_lookup_min > rollout.prompt_lookup_max:
        rule = f"must be <= prompt_lookup_max({rollout.prompt_lookup_max})"
        yield Violation({LEAST: rollout.prompt_lookup_min}, rule, {LEAST: rollout.prompt_lookup_max})
    if config.trainer.device != "cpu":
        rule = f"needs trainer.device=cpu, and it is {config.trainer.device}: no GPU has run it"
        yield Violation({KEY: given}, rule, {KEY: None})
    elif given != MTP and not config_only and importlib.util.find_spec(COMPILER) is None:
        rule = f"needs {COMPILER}, which is not installed: pip install {COMPILER}=={COMPILERS_VERSION}"
        yield Violation({KEY: given}, rule, {KEY: None})
    if config.returns_experts:
        asked = {
            f"{ACTOR}.router_replay.mode": shared.actor.router_replay.mode,
            f"{ROLLOUT}.enable_rollout_routing_replay": rollout.enable_rollout_routing_replay,
        }
        rule = "must be null where the engine returns experts, which vLLM does only without speculative decoding"
        yield Violation({KEY: given} | asked, rule, {KEY: None})
    model = next((model for model in models if model.path == shared.model.path), None)
    if model is not None and model.model is not None and (why := model.attention.undrafted):
        yield Violation({KEY: given}, f"is not supported for {why}, which {model.path} has", {KEY: None})
