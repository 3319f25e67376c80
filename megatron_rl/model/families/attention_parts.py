"""How queries meet keys, where it is not with all that came before: windows, soft caps, scales, parts that turn.

Families say which keys of config.json ask for it (`AttentionKeys`); a model's own choices are an `AttentionShape`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LOCAL, GLOBAL = "sliding_attention", "full_attention"
"""What config.json calls a layer whose tokens attend to the last `sliding_window` positions, and any other."""


@dataclass(frozen=True)
class AttentionKeys:
    """Where config.json says how a family's attention differs from the usual.

    scale: the key of a number of which the inverse square root scales products of queries and keys, in the place of the
    head's size; None: the head's size. soft_cap: the key of a bound c, as c tanh(x / c), on these products; None: there
    is none. local: layers attend to a window, where `layer_types` lists them or, without that, in all but every
    `period`-th; `period_key`: a key with another period. thetas: layers without a window and those with one have rotary
    embeddings of their own, with these bases where config.json does not say; None: all layers have the same.
    partial_rotary: the share of a head that turns where config.json does not say; None: all of it, always.
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
    """One model's choices. scale: of products of queries and keys. soft_cap: their bound; None: none.

    windows: of every layer, positions that a token attends to, its own among them; None: all before it; (): of none.
    turned: the elements of a head that the rotary embedding turns, from the first on. two_ropes: layers with a window
    have a rotary embedding of their own.
    """

    scale: float
    turned: int
    soft_cap: float | None = None
    windows: tuple[int | None, ...] = ()
    two_ropes: bool = False

    def window(self, layer: int) -> int | None:
        """Of one layer, counted over the whole model from 0."""
        return self.windows[layer] if self.windows else None

    @property
    def is_whole(self) -> bool:
        """Whether a token attends to all before it by plain products."""
        return self.soft_cap is None and not any(self.windows)


def attention_shape(keys: AttentionKeys, settings: Mapping[str, Any], head_size: int) -> AttentionShape:
    """From the content of a config.json, with what its family takes for granted."""
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
    """Of every layer, whether it is `LOCAL` or `GLOBAL`; families without windows have only the latter."""
    count = settings["num_hidden_layers"]
    if not keys.local:
        return [GLOBAL] * count
    if settings.get("layer_types"):
        return list(settings["layer_types"])
    period = keys.period if keys.period_key is None else settings.get(keys.period_key) or keys.period
    return [LOCAL if (layer + 1) % period else GLOBAL for layer in range(count)]


def rotary_share(keys: AttentionKeys, settings: Mapping[str, Any]) -> float:
    """The share of a head that turns. transformers 5 has it among the rotary settings, older ones beside them."""
    if keys.partial_rotary is None:
        return 1.0
    rope = settings.get("rope_parameters") or {}
    share: float = rope.get("partial_rotary_factor", settings.get("partial_rotary_factor", keys.partial_rotary))
    return share


Q_RANK = "q_lora_rank"
DEFAULT_Q_RANK = 1536
"""transformers' and vLLM's where config.json has none; an explicit null is a query made of the hidden state."""
SIZE_KEYS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class LatentAttention:
    """q_rank, kv_rank: elements of the latent vectors of queries (None: there is none) and of keys and values.

    nope, rope, value: elements per head of a query's and a key's part that does not turn and that does, and of a value.
    The part of a key that turns is made of the hidden state, one for all heads.
    """

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int

    @property
    def query(self) -> int:
        """Elements of a query's and a key's head."""
        return self.nope + self.rope

    @property
    def cached(self) -> int:
        """Elements that generation keeps of a token and layer, for all heads and on every TP rank."""
        return self.kv_rank + self.rope

    @classmethod
    def from_hf(cls, settings: Mapping[str, Any]) -> LatentAttention:
        """From the content of a config.json. Raises KeyError when a number is not there."""
        return cls(settings.get(Q_RANK, DEFAULT_Q_RANK), *(settings[key] for key in SIZE_KEYS))
