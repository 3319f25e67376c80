"""Folders of models with a language model inside: what an export writes next to the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from megatron_rl.checkpoint import pass_through
from megatron_rl.checkpoint.hf_config import language_config
from megatron_rl.checkpoint.weight_files import MODEL_FILES
from megatron_rl.model.families import family_of

CONFIG = "config.json"
DTYPE_KEYS = ("dtype", "torch_dtype")
SECTIONS = ("mrope_section", "mrope_interleaved")
"""Settings of a rotary embedding that only places in images need."""


def copy_description(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Copy all files of a model but its weights: config.json, with this dtype, tokenizer and processors.

    config.json is the file as it was if it names the dtype already, or none.
    """
    for file in sorted(source.iterdir()):
        if file.suffix in MODEL_FILES and not file.name.endswith(".index.json") and file.name != pass_through.FILE:
            shutil.copyfile(file, folder / file.name)
    settings = json.loads((source / CONFIG).read_text())
    written = with_dtype(settings, str(dtype).removeprefix("torch."))
    if written != settings:
        (folder / CONFIG).write_text(json.dumps(written, indent=2) + "\n")


def with_dtype(settings: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Replace the dtype that a config.json names for the whole model and for its language model."""
    inside = family_of(settings["architectures"]).inside
    own = {key: dtype for key in DTYPE_KEYS if settings.get(key) is not None}
    if inside is None or inside.key not in settings:
        return {**settings, **own}
    text = settings[inside.key]
    return {**settings, **own, inside.key: {**text, **{key: dtype for key in DTYPE_KEYS if text.get(key) is not None}}}


def classifier_config(source: Path) -> PretrainedConfig:
    """transformers' configuration of the classifier with the trunk of a folder's language model."""
    config = language_config(source)
    family = family_of(config.architectures)
    if family.inside is None:
        return config
    settings = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures")}
    rope = settings.get("rope_parameters") or {}
    settings["rope_parameters"] = {key: value for key, value in rope.items() if key not in SECTIONS}
    classifier: PretrainedConfig = AutoConfig.for_model(family.text.model_type, **settings)
    return classifier
