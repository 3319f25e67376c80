"""Rules of options that stages which do not generate do not have."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_rl.config.roles import roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.ledger.planner.balance_rules import AUX, BIAS, Z

WITHOUT: dict[str, bool | float] = {AUX: 0.0, Z: 0.0, BIAS: False}
"""What balances experts -> the value that means nothing does."""


def tuning_option_problems(config: RunConfig) -> Iterable[Violation]:
    """Experts are balanced, and passes choose how many ranks share a sequence, in PPO alone."""
    stage = config.trainer.stage
    for role in roles_of(config):
        options, group = role.megatron.override_transformer_config, f"{role.key}.megatron"
        for name, off in WITHOUT.items():
            if value := getattr(options, name):
                key = f"{group}.override_transformer_config.{name}"
                yield Violation({key: value}, f"is not there for {stage}: experts are balanced in ppo", {key: off})
        if role.megatron.dynamic_context_parallel and role.megatron.context_parallel_size > 1:
            key = f"{group}.dynamic_context_parallel"
            rule = f"is not there for {stage}: all ranks of context_parallel_size share every sequence"
            yield Violation({key: True}, rule, {key: False})
