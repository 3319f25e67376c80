"""Variants of attention: windows, soft caps, scales, partial rotary embeddings, latent attention.

Families name the config.json keys that ask for them (`AttentionKeys`); `AttentionShape` has one model's values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LOCAL, GLOBAL = "sliding_attention", "full_attention"
"""config.json's names of a layer with a window of `sliding_window` positions, and of a layer without."""


@dataclass(frozen=True)
class AttentionKeys:
    """The config.json keys of a family's variants of attention.

    scale: the key of a number x; products of queries and keys are scaled by x^-0.5; None: x is the head size. soft_cap:
    the key of a bound c on these products, as c tanh(x / c); None: they have no bound. local: layers have a window if
    `layer_types` says so; without that key, all but every `period`-th layer. period_key: a key with another period.
    thetas: default bases of two rotary embeddings, for layers without a window and with one; None: all layers share
    one. partial_rotary: the default share of a head that is rotated; None: always the whole head.
    """

    scale: str | None = None
    soft_cap: str | None = None
    local: bool = False
    period: int = 2
    period_key: str | None = None
    thetas: tuple[float, float] | None = None
    partial_rotary: float | None = None


@dataclass(frozen=True)
class AttentionShape:
    """One model's attention. scale: of products of queries and keys. soft_cap: their bound; None: no bound.

    windows: per layer the number of positions that a token attends to, including its own; None: all before it; (): no
    layer has a window. turned: number of elements of a head that are rotated, from the first on. two_ropes: layers with
    a window have a rotary embedding of their own.
    """

    scale: float
    turned: int
    soft_cap: float | None = None
    windows: tuple[int | None, ...] = ()
    two_ropes: bool = False

    def window(self, layer: int) -> int | None:
        """The window of one layer, counted over the whole model from 0."""
        return self.windows[layer] if self.windows else None

    @property
    def is_whole(self) -> bool:
        """Whether attention is plain: no bound and no window."""
        return self.soft_cap is None and not any(self.windows)


def attention_shape(keys: AttentionKeys, settings: Mapping[str, Any], head_size: int) -> AttentionShape:
    """Read it from the settings of a config.json with the family's defaults."""
    scaled = head_size if keys.scale is None else settings[keys.scale]
    cap = None if keys.soft_cap is None else settings.get(keys.soft_cap)
    windows: tuple[int | None, ...] = ()
    if keys.local:
        windows = tuple(
            settings.get("sliding_window") if kind == LOCAL else None for kind in layer_kinds(keys, settings)
        )
    share = rotary_share(keys, settings)
    return AttentionShape(scaled**-0.5, int(head_size * share), cap or None, windows, keys.thetas is not None)


def layer_kinds(keys: AttentionKeys, settings: Mapping[str, Any]) -> list[str]:
    """`LOCAL` or `GLOBAL` for every layer; families without windows have only the latter."""
    count = settings["num_hidden_layers"]
    if not keys.local:
        return [GLOBAL] * count
    if settings.get("layer_types"):
        return list(settings["layer_types"])
    period = keys.period if keys.period_key is None else settings.get(keys.period_key) or keys.period
    return [LOCAL if (layer + 1) % period else GLOBAL for layer in range(count)]


def rotary_share(keys: AttentionKeys, settings: Mapping[str, Any]) -> float:
    """The share of a head that is rotated. transformers 5 has it in the rotary settings, older versions beside them."""
    if keys.partial_rotary is None:
        return 1.0
    rope = settings.get("rope_parameters") or {}
    share: float = rope.get("partial_rotary_factor", settings.get("partial_rotary_factor", keys.partial_rotary))
    return share


Q_RANK = "q_lora_rank"
DEFAULT_Q_RANK = 1536
"""The default of transformers and vLLM. With an explicit null the query is made from the hidden state."""
SIZE_KEYS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), read from config.json.

    q_rank, kv_rank: elements of the latent vectors of queries (None: they have none) and of keys and values.
    nope, rope: elements per head of the unrotated and the rotated part of a query and a key; value: of a value. The
    rotated part of a key is made from the hidden state, one for all heads.
    """

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int

    @property
    def query(self) -> int:
        """Elements of one head of a query and a key."""
        return self.nope + self.rope

    @property
    def cached(self) -> int:
        """Elements per token and layer in the KV cache, for all heads; every TP rank has them."""
        return self.kv_rank + self.rope

    @classmethod
    def from_hf(cls, settings: Mapping[str, Any]) -> LatentAttention:
        """Read it from the settings of a config.json. Raises KeyError if a number is missing."""
        return cls(settings.get(Q_RANK, DEFAULT_Q_RANK), *(settings[key] for key in SIZE_KEYS))
