"""What a config.json leaves out: preflight reads it as transformers does, whose settings ranks train by."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from megatron_rl.checkpoint.identity import computed_settings
from megatron_rl.checkpoint.model_folder import ModelFolder, end_tokens
from megatron_rl.errors import ConfigError
from megatron_rl.model.families import FAMILIES, Family, Model, rollout_settings
from megatron_rl.planning.folder_checks import SIZES, read_model_folder

NESTED = ("rope_parameters", "text_config")
STARTING = {"DeepseekV2ForCausalLM": {"num_experts_per_tok": 6}, "Glm4MoeForCausalLM": {"head_dim": 128}}
"""What transformers' defaults of the other keys need to be a model."""
LATER = {"Gemma3ForConditionalGeneration": "tie_word_embeddings", "Gemma4ForCausalLM": "sliding_window"}
"""Nulls that ranks refuse, with a sentence, and preflight does not."""
NOT_ARITHMETIC = ("architectures", "model_type")
"""Keys that say by which class a config.json is read."""


def without_one(settings: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """(dotted key, settings without it), for every key of a config.json and of the objects inside that are read."""
    for key, value in settings.items():
        if key in NOT_ARITHMETIC:
            continue
        yield ".".join((*path, key)), {name: other for name, other in settings.items() if name != key}
        if key in NESTED and isinstance(value, dict):
            yield from ((name, {**settings, key: inner}) for name, inner in without_one(value, (*path, key)))


def whole_settings(family: Family) -> dict[str, Any]:
    """A config.json with all defaults of transformers' class, but for those that a family cannot have."""
    whole: dict[str, Any] = json.loads(CONFIG_MAPPING[family.model_type]().to_json_string(use_diff=False))
    fixed = {name: value for name, value in family.fixed.items() if name in whole and family.inside is None}
    return whole | {"architectures": [family.architecture], **fixed, **STARTING.get(family.architecture, {})}


def required(family: Family) -> set[str]:
    """Keys without which preflight refuses a folder, though transformers has a default: sizes and all numbers of yarn
    must be said, and some defaults are of what no family here computes.
    """
    experts = family.experts
    own = () if experts is None else (*experts.count_keys, experts.size_key, "num_experts_per_tok")
    shared = () if experts is None or experts.shared is None else (experts.shared.size_key,)
    yarn = (f"rope_parameters.{name}" for name in ("rope_type", *family.attention.rope_types.get("yarn", ())))
    further = (*STARTING.get(family.architecture, {}), *family.fixed, *family.attention.size_keys)
    return {"text_config", *SIZES, *own, *shared, *yarn, *further} - (family.defaults.keys() - family.fixed.keys())


def facts(family: Family, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """All that one reading gives: shape, identity, end tokens, what the engine is told."""
    return {
        "shape": Model.of(settings).shape,
        "identity": computed_settings(settings),
        "ends": end_tokens(folder, settings),
        "engine": rollout_settings(family, settings),
        "longest": family.given(settings)["max_position_embeddings"],
    }


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_what_a_config_json_leaves_out_has_transformers_default(family: Family, tmp_path: Path) -> None:
    """Each key of transformers' class left out, one at a time, of a folder with all its defaults: preflight and ranks
    read the same, or preflight refuses, for sizes alone. Would not catch a key that transformers invents later, nor two
    keys of which the default of one follows from the other."""
    whole, refused = whole_settings(family), set()
    for key, settings in [("", whole), *without_one(whole)]:
        (tmp_path / "config.json").write_text(json.dumps(settings))
        sizes, problems = read_model_folder("model", ModelFolder(tmp_path), config_only=True)
        if problems or sizes is None:
            assert key, problems
            refused.add(key.removeprefix("text_config."))
            continue
        ours = facts(family, ModelFolder(tmp_path).settings, tmp_path)
        assert ours == facts(family, ModelFolder(tmp_path).language_config.to_dict(), tmp_path), key
        assert sizes.parts.shape == ours["shape"]
    assert refused <= required(family)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_null_is_read_as_by_transformers_or_refused(family: Family, tmp_path: Path) -> None:
    """Of each key with a default: what a rank would end at is refused before. Would not catch other wrong types."""
    whole = whole_settings(family)
    for key in ("rms_norm_eps", *family.text.defaults):
        inside = {} if family.inside is None else {family.inside.key: whole[family.inside.key] | {key: None}}
        (tmp_path / "config.json").write_text(json.dumps(whole | (inside or {key: None})))
        _, problems = read_model_folder("model", ModelFolder(tmp_path), config_only=True)
        try:
            theirs = ModelFolder(tmp_path).language_config.to_dict()
        except ConfigError as error:
            assert str(error).startswith("transformers cannot read")
            assert problems or LATER.get(family.architecture) == key, key
            continue
        ours = ModelFolder(tmp_path).settings
        assert problems or facts(family, ours, tmp_path) == facts(family, theirs, tmp_path), key
