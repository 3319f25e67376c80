"""Rules of `rollout.speculative`: lengths that are compared, and the package that compiles the search."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from megatron_rl.config.keys import ROLLOUT
from megatron_rl.config.rollout_keys import MTP
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation

KEY, LEAST = f"{ROLLOUT}.speculative", f"{ROLLOUT}.prompt_lookup_min"
COMPILER = "numba"
"""What the searches for earlier tokens, vLLM's and ours, are compiled with."""
COMPILERS_VERSION = "0.65.0"
"""vLLM's own pin."""


def draft_problems(config: RunConfig, *, config_only: bool = False) -> Iterable[Violation]:
    """Every violation. Constraints report unknown names and bounds. config_only: packages need not be installed."""
    rollout = config.actor_rollout_ref.rollout
    given = rollout.speculative
    if given is None:
        return
    if rollout.prompt_lookup_min > rollout.prompt_lookup_max:
        rule = f"must be <= prompt_lookup_max({rollout.prompt_lookup_max})"
        yield Violation({LEAST: rollout.prompt_lookup_min}, rule, {LEAST: rollout.prompt_lookup_max})
    if given != MTP and not config_only and importlib.util.find_spec(COMPILER) is None:
        rule = f"needs {COMPILER}, which is not installed: pip install {COMPILER}=={COMPILERS_VERSION}"
        yield Violation({KEY: given}, rule, {KEY: None})
