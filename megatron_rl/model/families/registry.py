"""All families, by the names config.json gives their models."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_rl.errors import ConfigError
from megatron_rl.model.families import (
    deepseek_v2,
    deepseek_v3,
    gemma2,
    gemma3,
    glm4_moe,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from megatron_rl.model.families.family import Family

MODULES = (
    deepseek_v2,
    deepseek_v3,
    gemma2,
    gemma3,
    glm4_moe,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
_ALL = tuple(module.FAMILY for module in MODULES)

FAMILIES: dict[str, Family] = {family.architecture: family for family in _ALL}
"""Language models: what an actor, a reference or a critic can start from."""
REWARD_FAMILIES: dict[str, Family] = {family.reward_architecture: family for family in _ALL}
"""Models with a classification head, which only a critic can start from."""


def family_of(architectures: Iterable[str] | None) -> Family:
    """The family of a HF config's `architectures`; raises ConfigError, listing the known ones, when there is none."""
    known = FAMILIES | REWARD_FAMILIES
    for name in architectures or []:
        if name in known:
            return known[name]
    raise ConfigError(f"architecture {architectures} is not supported; known: {', '.join(sorted(known))}")


def is_reward_model(architectures: Iterable[str] | None) -> bool:
    """Whether a HF config's `architectures` name a model with a classification head."""
    return any(name in REWARD_FAMILIES for name in architectures or [])
