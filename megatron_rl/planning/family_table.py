"""Which family can do what, asked of the families' parts: the table of `megatron-rl families`. Needs no torch.

A family of the registry is read, trained, cut by TP and PP, served and written by the same code as all others. What
differs is whether it has experts to spread, whether its attention can share a sequence over ranks, whether its
linear layers take adapters, and whether it reads images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.model.families import FAMILIES, Family, Model
from megatron_rl.model.families.chat_format import CHAT_FORMATS, ChatFormat
from megatron_rl.model.families.refused import REFUSED, Refusal
from megatron_rl.model.families.wide_heads import SHARED, WideHeadKeys

COLUMNS = ("import", "train", "TP", "PP", "EP", "CP", "LoRA", "generate", "export", "images")
CHAT_COLUMNS = ("turns", "thoughts", "tools")
"""How the family's published models write conversations (`ChatFormat`)."""
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "vocab_size": 1024,
}
ROPE = {"factor": 2.0, "original_max_position_embeddings": 512, "beta_fast": 32.0, "beta_slow": 1.0}
"""Numbers of a rotary embedding, where a family has none without them."""
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
"""Sizes for which vLLM has a kernel on CPU, too."""


@dataclass(frozen=True)
class FamilyRow:
    """One family. lacks: column -> why the family cannot do it; other columns it can. chat: of its published
    models."""

    architecture: str
    lacks: Mapping[str, str]
    chat: ChatFormat

    @classmethod
    def of(cls, family: Family) -> FamilyRow:
        """Ask the parts of a small model."""
        model = Model.of(small_settings(family))
        lacks = {}
        if not any(layer.has_experts for layer in model.layers):
            lacks["EP"] = "it has no experts"
        if family.inside is None or family.inside.tower is None:
            lacks["images"] = "it has no vision tower that is read"
        return cls(family.architecture, lacks, CHAT_FORMATS[family.architecture])

    def cells(self) -> list[str]:
        """Return yes or no for each of COLUMNS, then the words of CHAT_COLUMNS, "-" for nothing."""
        words = [self.chat.turns, self.chat.thoughts or "-", ",".join(self.chat.tools) or "-"]
        return [*("no" if column in self.lacks else "yes" for column in COLUMNS), *words]


def small_settings(family: Family) -> dict[str, Any]:
    """The config.json of a small model of a family, with dense layers and layers with experts where it has both."""
    settings: dict[str, Any] = SMALL | {key: LATENT[key] for key in family.attention.size_keys if key in LATENT}
    if family.experts is not None:
        settings |= dict.fromkeys(family.experts.count_keys[:1], 8)
        settings |= {family.experts.size_key: 64, "num_experts_per_tok": 2}
        shared = family.experts.shared
        settings |= {} if shared is None else {shared.size_key: 64}
        settings |= {} if shared is None or shared.count_key is None else {shared.count_key: 1}
        settings |= {} if family.experts.scoring is None else {"n_group": 1, "topk_group": 1}
    if isinstance(family.attention, WideHeadKeys):  # as its published models have it
        settings |= {SHARED: True}
    types = family.attention.rope_types
    if "default" not in types:
        kind = next(iter(types))
        settings["rope_parameters"] = {"rope_type": kind, "rope_theta": 1e4} | {key: ROPE[key] for key in types[kind]}
    names = {"architectures": [family.architecture], "model_type": family.model_type, "eos_token_id": 1}
    return settings | {"hidden_act": family.style.activation} | dict(family.fixed) | names


def refused_rows() -> list[Refusal]:
    """The architectures that are refused by name; the last fits all others and is left out."""
    return list(REFUSED[:-1])


def family_rows() -> list[FamilyRow]:
    """A row for each family, by name."""
    return [FamilyRow.of(FAMILIES[name]) for name in sorted(FAMILIES)]
