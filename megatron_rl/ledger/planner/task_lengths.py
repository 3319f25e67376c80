"""Rules of lengths in stages that do not generate: what a model reads at most, and what fits into one pass."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_rl.config.as_stage import longest_example
from megatron_rl.config.keys import value_of
from megatron_rl.config.roles import roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.ledger.planner.model_folder import ModelSizes

KEY = "data.max_length"


def stage_length_problems(config: RunConfig, models: list[ModelSizes]) -> Iterable[Violation]:
    """`data.max_length` against models and passes. Answers that stay together are counted when files are read."""
    longest = longest_example(config)
    if longest < 2:
        return
    override = config.actor_rollout_ref.model.override_config.max_position_embeddings
    for model in models:
        told = {} if override is None else {"override_config.max_position_embeddings": override}
        for name, limit in ((told or model.longest) | model.windows).items():
            if longest > limit:
                yield Violation({KEY: longest}, f"must be <= {name}({limit}) of {model.path}", {KEY: limit})
    for role in roles_of(config):
        for one in role.passes:
            ranks, limit = role.megatron.context_parallel_size, value_of(config, one.key)
            if one.max_tokens is not None and min(ranks, limit) >= 1 and limit * ranks < longest:
                shared = f" / cp({ranks})" if ranks > 1 else ""
                yield Violation(
                    {one.key: limit}, f"must be >= {KEY}({longest}){shared}", {one.key: -(-longest // ranks)}
                )
