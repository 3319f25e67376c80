"""Find the family of a config.json among those of `known/`.

To add a family, add an entry to a file there, or a file with `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_rl.config.declarations import import_modules_of
from megatron_rl.config.problems import nearest_name
from megatron_rl.errors import ConfigError
from megatron_rl.model.families.family import Family, Inside
from megatron_rl.model.families.refused import refusal_of

KNOWN = "megatron_rl.model.families.known"
ALL: tuple[Family, ...] = tuple(family for maker in import_modules_of(KNOWN) for family in maker.FAMILIES)

FAMILIES: dict[str, Family] = {family.architecture: family for family in ALL}
"""Language models: what an actor, a reference or a critic can start from."""
REWARD_FAMILIES: dict[str, Family] = {
    family.reward_architecture: family for family in reversed(ALL) if family is family.classifier(with_tower=True)
}
"""Models with a classification head, which only a critic can start from. Of families that share one, the first."""
SECTIONS = "mrope"
"""An old name of the plain rotary embedding, whose frequencies are divided between places in text and in an image."""
TIED = "tie_word_embeddings"
OUTER = ("architectures", "model_type", "quantization_config", TIED)
"""Settings of a whole model, which count before those of a language model inside."""

KNOWN_TYPES: dict[str, str] = {other: family.model_type for family in ALL for other in family.other_types}
"""model_type of a published config.json that transformers does not know -> the one by which it reads it."""


def family_of(architectures: Iterable[str] | None) -> Family:
    """The family of a HF config's `architectures`; raises ConfigError when there is none, with what the first needs,
    the nearest one and the known ones.
    """
    known, names = FAMILIES | REWARD_FAMILIES, list(architectures or [])
    for name in names:
        if name in known:
            return known[name]
    lacks = ""
    if names:
        refusal = refusal_of(names[0])
        near = refusal.nearest if refusal.nearest in known else nearest_name(names[0], known)
        lacks = f": it needs {refusal.needs}; try: {near}"
    raise ConfigError(f"architecture {architectures} is not supported{lacks}; known: {', '.join(sorted(known))}")


def is_reward_model(architectures: Iterable[str] | None) -> bool:
    """Whether a HF config's `architectures` name a model with a classification head."""
    return any(name in REWARD_FAMILIES for name in architectures or [])


def inside_of(architectures: Iterable[str] | None) -> Inside | None:
    """Where the language model of a HF config's `architectures` is in a larger one; None if it is the whole."""
    known = FAMILIES | REWARD_FAMILIES
    return next((known[name].inside for name in architectures or [] if name in known), None)


def text_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config.json's language model, which may be inside a larger model; else all settings.

    Raises ConfigError if there is no object where they should be.
    """
    inside = inside_of(settings.get("architectures"))
    if inside is None:
        return dict(settings)
    text = settings.get(inside.key, {})
    if not isinstance(text, Mapping):
        raise ConfigError(f"{inside.key} must be an object in braces, and is {text!r:.80}")
    flat = {**settings, **text} | {key: settings[key] for key in OUTER if key in settings}
    flat.pop(inside.key, None)
    if TIED not in settings:  # transformers takes its default then, whatever the language model's settings are
        flat.pop(TIED, None)
    rope = flat.get("rope_scaling")
    if isinstance(rope, Mapping) and rope.get("type") == SECTIONS:
        flat["rope_scaling"] = {**rope, "type": "default"}
    return flat
