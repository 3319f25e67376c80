"""What config.json says of attention: windows, soft caps, scales, partial rotary embeddings, latent vectors.

Families name the keys (`AttentionKeys`). The keys read one model's values and make the part of each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_rl.model.parts import (
    AttentionPart,
    AttentionShape,
    GroupedAttention,
    LatentAttention,
    ModelShape,
    SinkAttention,
)
from megatron_rl.model.parts.latent import SIZE_KEYS

ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Supported type -> settings that it needs. The frequencies do not depend on the length of a sequence."""
YARN = "yarn"
PROPORTIONAL = "proportional"
"""A rotary embedding whose frequencies are those of the whole head, and 0 beyond a share of it."""
LOCAL, GLOBAL = "sliding_attention", "full_attention"
"""config.json's names of a layer with a window of `sliding_window` positions, and of a layer without."""


@dataclass(frozen=True)
class AttentionKeys:
    """The config.json keys of a family's variants of attention.

    scale: the key of a number x; products of queries and keys are scaled by x^-0.5; None: x is the head size. soft_cap:
    the key of a bound c on these products, as c tanh(x / c); None: they have no bound. local: layers have a window if
    `layer_types` says so; without that key, all but every `period`-th layer. period_key: a key with another period.
    thetas: default bases of two rotary embeddings, for layers without a window and with one; None: all layers share
    one. partial_rotary: the default share of a head that is rotated; None: always the whole head. ends_global: the last
    layer has no window, whatever else says. turned_key: the key of the number of elements that are rotated, which vLLM
    reads and transformers does not; None: there is none. joint_norms: norms of queries and keys are over all heads
    together.
    """

    scale: str | None = None
    soft_cap: str | None = None
    local: bool = False
    period: int = 2
    period_key: str | None = None
    thetas: tuple[float, float] | None = None
    partial_rotary: float | None = None
    ends_global: bool = False
    turned_key: str | None = None
    joint_norms: bool = False

    size_keys: ClassVar[tuple[str, ...]] = ()
    """Further keys that must be sizes."""
    shares_hidden: ClassVar[bool] = True
    """Without `head_dim` the heads share the hidden size."""
    other_kinds: ClassVar[frozenset[str]] = frozenset()
    """config.json's names of layers that are not of full attention, in addition to those with windows."""
    rope_types: ClassVar[Mapping[str, tuple[str, ...]]] = ROPE_TYPES
    absent_ropes: ClassVar[Mapping[str, Any]] = {}
    """Rotary settings where config.json has none."""
    differing_yarn: ClassVar[tuple[str, ...]] = ("attention_factor", "truncate")
    """Settings of yarn that vLLM reads differently from transformers."""
    has_fixed_kinds: ClassVar[bool] = False
    """vLLM reads no `layer_types`: layers must have windows by `period`."""
    sinks: ClassVar[bool] = False
    """Every head has a logit of its own in its softmax."""
    made: ClassVar[type[GroupedAttention]] = GroupedAttention
    """The part that the keys make."""

    def problem(self, settings: Mapping[str, Any]) -> tuple[dict[str, Any], str] | None:
        """Settings that do not fit each other, and the rule that they break; None if they fit. Check types before."""
        return None

    def sizes(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """num_kv_heads, head_size and attention of `ModelShape`, from the settings of a config.json with defaults."""
        heads = settings["num_attention_heads"]
        head_size = settings.get("head_dim") or settings["hidden_size"] // heads
        kv_heads = settings.get("num_key_value_heads") or heads
        return {"num_kv_heads": kv_heads, "head_size": head_size, "attention": self.described(settings, head_size)}

    def described(self, settings: Mapping[str, Any], head_size: int) -> AttentionShape:
        """Return the variants of attention, from the settings of a config.json with defaults."""
        return attention_shape(self, settings, head_size)

    def part(self, shape: ModelShape, layer: int) -> AttentionPart:
        """Return the attention of one layer."""
        described = shape.attention if isinstance(shape.attention, AttentionShape) else AttentionShape()
        return self.made(
            shape.hidden_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_size,
            shape.qkv_bias,
            shape.qk_norm,
            described.soft_cap,
            described.window(layer),
            described.is_whole,
            joint_norms=self.joint_norms,
            gated=described.gated,
        )


class SinkKeys(AttentionKeys):
    """Keys of attention with sinks (gpt-oss). vLLM takes yarn for granted, and a window in every second layer."""

    rope_types: ClassVar[Mapping[str, tuple[str, ...]]] = {
        YARN: ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
    }
    differing_yarn = ("attention_factor", "mscale", "mscale_all_dim")
    has_fixed_kinds = True
    sinks = True
    made = SinkAttention


class LatentKeys(AttentionKeys):
    """Keys of multi-head latent attention."""

    size_keys = SIZE_KEYS
    shares_hidden = False
    rope_types: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "default": (),
        YARN: ("factor", "original_max_position_embeddings"),
    }
    """Yarn also scales its softmax (Peng et al., arXiv:2309.00071)."""

    def sizes(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Every head has keys of its own; the head size is that of a query."""
        latent = LatentAttention.from_hf(settings)
        return {"num_kv_heads": latent.num_heads, "head_size": latent.query, "attention": latent}

    def part(self, shape: ModelShape, layer: int) -> AttentionPart:
        """All layers are equal. Raises TypeError for sizes that other keys have read."""
        if not isinstance(shape.attention, LatentAttention):
            raise TypeError(f"these are not sizes of latent attention: {shape.attention}")
        return shape.attention


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
    two_ropes, turned = keys.thetas is not None, int(head_size * share)
    return AttentionShape(scaled**-0.5, turned, cap or None, windows, two_ropes, sinks=keys.sinks)


def turned_elements(keys: AttentionKeys, settings: Mapping[str, Any]) -> int:
    """Elements of a head that are rotated. settings: with the family's defaults, and a `head_dim` or its parts."""
    size = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    return int(size * rotary_share(keys, settings))


def layer_kinds(keys: AttentionKeys, settings: Mapping[str, Any]) -> list[str]:
    """`LOCAL` or `GLOBAL` for every layer; families without windows have only the latter."""
    if not keys.local:
        return [GLOBAL] * settings["num_hidden_layers"]
    kinds = list(settings.get("layer_types") or kinds_by_period(keys, settings))
    return [*kinds[:-1], GLOBAL] if keys.ends_global else kinds


def kinds_by_period(keys: AttentionKeys, settings: Mapping[str, Any], between: str = LOCAL) -> list[str]:
    """The kind of every layer where config.json has no `layer_types`. between: of those that are not `GLOBAL`."""
    count = settings["num_hidden_layers"]
    period = keys.period if keys.period_key is None else settings.get(keys.period_key) or keys.period
    return [between if (layer + 1) % period else GLOBAL for layer in range(count)]


def rotary_share(keys: AttentionKeys, settings: Mapping[str, Any]) -> float:
    """The share of a head that is rotated. transformers 5 has it in the rotary settings, older versions next to
    them."""
    if keys.partial_rotary is None:
        return 1.0
    rope = settings.get("rope_parameters") or {}
    share: float | None = rope.get("partial_rotary_factor", settings.get("partial_rotary_factor", keys.partial_rotary))
    return 1.0 if share is None else share
