"""Choose merged adapters for generation where a model's cannot be applied next to its weights."""

from __future__ import annotations

from collections.abc import Collection

from megatron_rl.config.keys import put
from megatron_rl.config.schema import RunConfig
from megatron_rl.planning.feature_rows.adapter_rows import lora_key, merge_choices
from megatron_rl.planning.features import RunFacts
from megatron_rl.planning.preflight import read_models


def with_merge_chosen(config: RunConfig, given: Collection[str]) -> tuple[RunConfig, list[str]]:
    """Set `merge` of each role that needs it and whose user left it open; return `config` and a line for each.

    given: the keys that the user set.
    """
    if not config.generates or not any(role.lora.rank for role in RunFacts(config).trained_roles):
        return config, []
    run, lines = RunFacts(config, read_models(config, config_only=True)[0]), []
    for role, why in merge_choices(run):
        key = f"{lora_key(role)}.merge"
        if key not in given:
            put(config, key, True)
            lines.append(f"{key}=true is chosen: {why}")
    return config, lines
