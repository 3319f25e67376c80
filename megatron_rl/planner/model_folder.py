"""What a Hugging Face folder says about its model, read from config.json alone, and what of it cannot be trained."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.problems import nearest_name

KNOWN_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
VOCAB_PADDING = 64
"""Rows of embedding and head are padded to a multiple of this."""

SIZES = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
FIXED_SETTINGS = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "quantization_config": None}
"""config.json settings that may have one value only (or be absent)."""


@dataclass(frozen=True)
class ModelSizes:
    """The numbers of config.json that a layout must fit, and the folder they come from."""

    path: str
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    padded_vocab_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    vocab_size: int

    @property
    def rollout_vocab_size(self) -> int:
        """Rows of embedding and head in the rollout engine."""
        return -(-self.vocab_size // VOCAB_PADDING) * VOCAB_PADDING

    @property
    def tp_divides(self) -> dict[str, int]:
        """Name and value of everything that is cut into TP parts."""
        names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "padded_vocab_size")
        return {name: getattr(self, name) for name in names}

    @property
    def max_tp(self) -> int:
        """The largest TP size; all others are its divisors."""
        return math.gcd(*self.tp_divides.values())


def read_model_folder(
    key: str, path: str, known_architectures: Collection[str] = KNOWN_ARCHITECTURES
) -> tuple[ModelSizes | None, list[str]]:
    """The sizes of the model in `path` (None where they cannot be read) and all that is wrong with the folder.

    `key` is the configuration key to name in messages.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        parent = folder.parent
        neighbours = [str(other) for other in parent.iterdir() if other.is_dir()] if parent.is_dir() else []
        hint = f"nearest folder: {nearest_name(str(folder), neighbours)}" if neighbours else f"none in {parent}"
        return None, [f"{key}={path} must be a Hugging Face model folder, and there is none; {hint}"]
    problems = []
    if not any(folder.glob("*.safetensors")):
        problems.append(f"{key}={path} must hold *.safetensors files; it holds {_listing(folder)}")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        problems.append(f"{key}={path} must hold a tokenizer ({', '.join(TOKENIZER_FILES)}); found {_listing(folder)}")
    file = folder / "config.json"
    if not file.is_file():
        return None, [*problems, f"{key}={path} must hold config.json; it holds {_listing(folder)}"]
    try:
        settings = json.loads(file.read_text())
    except ValueError as error:
        return None, [*problems, f"{file} is not valid JSON: {error}"]
    problems += _unsupported(file, settings, known_architectures)
    lacking = [name for name in SIZES if not isinstance(settings.get(name), int)]
    if lacking:
        return None, [*problems, f"{file} must give whole numbers for {', '.join(lacking)}"]
    return _sizes(path, settings), problems


def _sizes(path: str, settings: dict[str, Any]) -> ModelSizes:
    vocab_size = settings["vocab_size"]
    return ModelSizes(
        path=path,
        num_attention_heads=settings["num_attention_heads"],
        num_key_value_heads=settings.get("num_key_value_heads") or settings["num_attention_heads"],
        intermediate_size=settings["intermediate_size"],
        padded_vocab_size=-(-vocab_size // VOCAB_PADDING) * VOCAB_PADDING,
        num_hidden_layers=settings["num_hidden_layers"],
        max_position_embeddings=settings["max_position_embeddings"],
        vocab_size=vocab_size,
    )


def _unsupported(file: Path, settings: dict[str, Any], known_architectures: Collection[str]) -> list[str]:
    problems = []
    architectures = settings.get("architectures") or []
    if not set(architectures) & set(known_architectures):
        known = ", ".join(sorted(known_architectures))
        nearest = nearest_name(str(architectures[0]) if architectures else "", known_architectures)
        problems.append(f"architectures={architectures} of {file} must be one of {known}; nearest: {nearest}")
    for name in ("rope_scaling", "rope_parameters"):
        rope = settings.get(name) or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            problems.append(f"{name} of type {rope_type!r} ({file}) is not supported yet; nearest: 'default'")
    if settings.get("use_sliding_window") or set(settings.get("layer_types") or ()) - {"full_attention"}:
        problems.append(f"sliding-window attention ({file}) is not supported; nearest: use_sliding_window=false")
    for name, required in FIXED_SETTINGS.items():
        value = settings.get(name, required)
        if value != required:
            problems.append(f"{name}={value!r} of {file} is not supported; nearest: {required!r}")
    return problems


def _listing(folder: Path) -> str:
    return ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
