"""What a Hugging Face folder says about its model, read from config.json alone, and what of it cannot be trained."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.config.problems import nearest_name
from megatron_rl.parallel.sharding import padded_vocab_size

KNOWN_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
MOE_ARCHITECTURES = ("Qwen3MoeForCausalLM",)
"""Those whose every MLP is a router over experts."""
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
MOE_SIZES = ("moe_intermediate_size", "num_experts", "num_experts_per_tok")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
FIXED_SETTINGS = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "quantization_config": None}
"""config.json settings that may have one value only (or be absent)."""
MOE_FIXED_SETTINGS = {"decoder_sparse_step": 1, "mlp_only_layers": []}
"""The same for models with experts, where every layer must have them."""


@dataclass(frozen=True)
class ModelSizes:
    """The numbers of config.json that a layout must fit, and the folder they come from.

    `num_experts` and `moe_intermediate_size`, the columns of one expert, are 0 when dense.
    """

    path: str
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    padded_vocab_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    vocab_size: int
    num_experts: int = 0
    moe_intermediate_size: int = 0

    @property
    def rollout_tp_divides(self) -> dict[str, int]:
        """Name and value of everything that generation cuts over its TP ranks; experts too."""
        sizes = self.tp_divides | {"padded_vocab_size": self.padded_to(VOCAB_PADDING).padded_vocab_size}
        return sizes | ({"moe_intermediate_size": self.moe_intermediate_size} if self.num_experts else {})

    def padded_to(self, vocab_multiple: int) -> ModelSizes:
        """The same model with its vocabulary padded to a multiple; below 1 is another rule's business."""
        return replace(self, padded_vocab_size=padded_vocab_size(self.vocab_size, max(1, vocab_multiple)))

    @property
    def tp_divides(self) -> dict[str, int]:
        """Name and value of everything that is cut into TP parts; experts are cut into ETP parts instead."""
        mlp = () if self.num_experts else ("intermediate_size",)
        names = ("num_attention_heads", "num_key_value_heads", *mlp, "padded_vocab_size")
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
    # transformers writes either name, depending on its version.
    settings.setdefault("num_experts", settings.get("num_local_experts"))
    wanted = (*SIZES, *MOE_SIZES) if _has_experts(settings) else SIZES
    lacking = [name for name in wanted if not isinstance(settings.get(name), int)]
    if lacking:
        return None, [*problems, f"{file} must give whole numbers for {', '.join(lacking)}"]
    if _has_experts(settings):
        problems += _routing_problems(file, settings)
    return _sizes(path, settings), problems


def _has_experts(settings: dict[str, Any]) -> bool:
    return bool(set(settings.get("architectures") or ()) & set(MOE_ARCHITECTURES))


def _sizes(path: str, settings: dict[str, Any]) -> ModelSizes:
    vocab_size = settings["vocab_size"]
    experts = ("num_experts", "moe_intermediate_size") if _has_experts(settings) else ()
    return ModelSizes(
        path=path,
        num_attention_heads=settings["num_attention_heads"],
        num_key_value_heads=settings.get("num_key_value_heads") or settings["num_attention_heads"],
        intermediate_size=settings["intermediate_size"],
        padded_vocab_size=padded_vocab_size(vocab_size, VOCAB_PADDING),
        num_hidden_layers=settings["num_hidden_layers"],
        max_position_embeddings=settings["max_position_embeddings"],
        vocab_size=vocab_size,
        **{name: settings[name] for name in experts},
    )


def _routing_problems(file: Path, settings: dict[str, Any]) -> list[str]:
    """How many experts a token may be sent to."""
    top_k, num_experts = settings["num_experts_per_tok"], settings["num_experts"]
    if not 1 <= top_k <= num_experts:
        nearest = min(max(top_k, 1), num_experts)
        return [
            f"num_experts_per_tok={top_k} of {file} must be >= 1 and <= num_experts({num_experts}); nearest: {nearest}"
        ]
    if top_k == 1 and settings.get("norm_topk_prob", False):
        return [
            f"num_experts_per_tok=1 with norm_topk_prob=true ({file}) leaves the router without a gradient, "
            "because the only weight is always 1; nearest: norm_topk_prob=false"
        ]
    return []


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
    fixed = FIXED_SETTINGS | (MOE_FIXED_SETTINGS if _has_experts(settings) else {})
    for name, required in fixed.items():
        value = settings.get(name, required)
        if value != required:
            problems.append(f"{name}={value!r} of {file} is not supported; nearest: {required!r}")
    return problems


def _listing(folder: Path) -> str:
    return ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
