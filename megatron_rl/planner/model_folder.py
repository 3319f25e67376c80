"""What a Hugging Face folder says about its model, read from config.json alone, and what of it cannot be trained."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.config.problems import nearest_name
from megatron_rl.model.families import (
    FAMILIES,
    REWARD_FAMILIES,
    VOCAB_PADDING,
    Family,
    Routing,
    num_experts_key,
    num_labels,
    rope_problem,
    sliding_window,
)
from megatron_rl.parallel.sharding import padded_vocab_size

SIZES = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
STARTING_POINTS = FAMILIES | REWARD_FAMILIES
"""What a critic can start from: a language model's trunk, or a reward model."""


@dataclass(frozen=True)
class ModelSizes:
    """The numbers of config.json that a layout must fit, and the folder they come from.

    `num_experts` and `moe_intermediate_size`, the columns of one expert, are 0 when dense; `expert_size_key` is what
    config.json calls the latter. `sliding_window`: positions that a token attends to; None: all before it.
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
    expert_size_key: str = "moe_intermediate_size"
    sliding_window: int | None = None

    @property
    def rollout_tp_divides(self) -> dict[str, int]:
        """Name and value of everything that generation cuts over its TP ranks; experts too."""
        sizes = self.tp_divides | {"padded_vocab_size": self.padded_to(VOCAB_PADDING).padded_vocab_size}
        return sizes | ({self.expert_size_key: self.moe_intermediate_size} if self.num_experts else {})

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
    def longest(self) -> dict[str, int]:
        """Name and value of what limits prompt and response together: a window that cuts nothing off is no window."""
        window = {} if self.sliding_window is None else {"sliding_window": self.sliding_window}
        return {"max_position_embeddings": self.max_position_embeddings} | window

    @property
    def max_tp(self) -> int:
        """The largest TP size; all others are its divisors."""
        return math.gcd(*self.tp_divides.values())


def read_model_folder(
    key: str, path: str, known: Mapping[str, Family] = FAMILIES
) -> tuple[ModelSizes | None, list[str]]:
    """The sizes of the model in `path` (None where they cannot be read) and all that is wrong with the folder.

    `key` is the configuration key to name in messages, `known` the architectures that it may name, with their families.
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
    architectures = settings.get("architectures") or []
    name = next((name for name in architectures if name in known), None)
    if name is None:
        nearest = nearest_name(str(architectures[0]) if architectures else "", known)
        names = ", ".join(sorted(known))
        problem = f"architectures={architectures} of {file} must be one of {names} for {key}; nearest: {nearest}"
        return None, [*problems, problem]
    sizes, found = _read_settings(path, file, settings, known[name])
    if name in REWARD_FAMILIES and num_labels(settings) != 1:
        labels = num_labels(settings)
        found.append(f"num_labels={labels} of {file} must be 1, because a critic gives one value; nearest: 1")
    return sizes, problems + found


def _read_settings(
    path: str, file: Path, settings: dict[str, Any], family: Family
) -> tuple[ModelSizes | None, list[str]]:
    problems = list(_unsupported(file, settings, family))
    wanted = SIZES
    if family.experts is not None:
        wanted = (*SIZES, num_experts_key(family, settings), family.experts.size_key, "num_experts_per_tok")
    lacking = [name for name in dict.fromkeys(wanted) if not isinstance(settings.get(name), int)]
    if lacking:
        return None, [*problems, f"{file} must give whole numbers for {', '.join(lacking)}"]
    routing = None if family.experts is None else Routing.from_hf(family, settings)
    if routing is not None:
        problems += _routing_problems(file, routing, family)
    return _sizes(path, settings, family, routing), problems


def _sizes(path: str, settings: dict[str, Any], family: Family, routing: Routing | None) -> ModelSizes:
    vocab_size = settings["vocab_size"]
    experts = {}
    if routing is not None:
        experts = {
            "num_experts": routing.num_experts,
            "moe_intermediate_size": routing.ffn_size,
            "expert_size_key": family.experts.size_key,
        }
    return ModelSizes(
        path=path,
        num_attention_heads=settings["num_attention_heads"],
        num_key_value_heads=settings.get("num_key_value_heads") or settings["num_attention_heads"],
        intermediate_size=settings["intermediate_size"],
        padded_vocab_size=padded_vocab_size(vocab_size, VOCAB_PADDING),
        num_hidden_layers=settings["num_hidden_layers"],
        max_position_embeddings=settings["max_position_embeddings"],
        vocab_size=vocab_size,
        sliding_window=sliding_window(family, settings),
        **experts,
    )


def _routing_problems(file: Path, routing: Routing, family: Family) -> list[str]:
    """How many experts a token may be sent to."""
    top_k, num_experts = routing.experts_per_token, routing.num_experts
    if not 1 <= top_k <= num_experts:
        nearest = min(max(top_k, 1), num_experts)
        return [
            f"num_experts_per_tok={top_k} of {file} must be >= 1 and <= num_experts({num_experts}); nearest: {nearest}"
        ]
    if top_k == 1 and routing.normalised:
        normalised, nearest = "norm_topk_prob=true", "norm_topk_prob=false"
        if family.experts.norm_topk_prob:
            normalised, nearest = "weights that add up to 1", "num_experts_per_tok=2"
        return [
            f"num_experts_per_tok=1 with {normalised} ({file}) leaves the router without a gradient, "
            f"because the only weight is always 1; nearest: {nearest}"
        ]
    return []


def _unsupported(file: Path, settings: dict[str, Any], family: Family) -> Iterable[str]:
    problem = rope_problem(settings)
    if problem is not None:
        yield f"{file}: {problem}"
    kinds = {"full_attention"} if sliding_window(family, settings) is None else {"full_attention", "sliding_attention"}
    unknown = set(settings.get("layer_types") or ()) - kinds
    if unknown:
        yield f"layer_types with {', '.join(sorted(unknown))} ({file}) is not supported; nearest: full_attention"
    for name, required in family.fixed_settings.items():
        value = settings.get(name, required)
        if value != required:
            yield f"{name}={value!r} of {file} is not supported; nearest: {required!r}"


def _listing(folder: Path) -> str:
    return ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
