"""What config.json says of attention whose layers without a window have heads of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from megatron_rl.model.families.attention_keys import GLOBAL, LOCAL, PROPORTIONAL, AttentionKeys, layer_kinds
from megatron_rl.model.parts import AttentionPart, AttentionShape, GroupedAttention, ModelShape, WideHeads

SIZE, KV_HEADS, OF_LAYERS, SHARED = (
    "global_head_dim",
    "num_global_key_value_heads",
    "per_layer_config",
    "attention_k_eq_v",
)
OWN = ("head_dim", "num_key_value_heads")
"""Keys of one layer in `per_layer_config`."""
DEFAULT_SIZE = 512


class WideHeadKeys(AttentionKeys):
    """Keys of attention with two sizes of heads and normalised values. Products are not scaled.

    transformers from 5.16 on writes `per_layer_config`, the sizes of single layers; before it `global_head_dim` and
    `num_global_key_value_heads` were those of all layers without a window.
    """

    rope_types: ClassVar[Mapping[str, tuple[str, ...]]] = {"default": (), PROPORTIONAL: ()}
    absent_ropes: ClassVar[Mapping[str, Any]] = {
        LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
        GLOBAL: {"rope_type": PROPORTIONAL, "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    }

    def problem(self, settings: Mapping[str, Any]) -> tuple[dict[str, Any], str] | None:
        """Layers without a window must have equal heads, those with one none of their own."""
        wanted = [str(number) for number, kind in enumerate(layer_kinds(self, settings)) if kind == GLOBAL]
        # With more than ten layers transformers writes "05".
        given = {str(number).lstrip("0") or "0": own for number, own in (settings.get(OF_LAYERS) or {}).items()}
        sizes = [given.get(number) for number in wanted]
        if given and (given.keys() != set(wanted) or any(own != sizes[0] for own in sizes)):
            rule = f"must have equal heads for the layers of {GLOBAL}, {', '.join(wanted)}, and for no others"
            return {OF_LAYERS: given}, rule
        if given and not _are_sizes(sizes[0]):
            return {OF_LAYERS: given}, f"must have none but {', '.join(OWN)}, whole numbers >= 1"
        wide, heads = wide_heads(settings), settings["num_attention_heads"]
        if heads % wide.num_kv:
            return {KV_HEADS: wide.num_kv}, f"must divide num_attention_heads({heads})"
        if wide.size % 2:
            return {SIZE: wide.size}, "must be an even number of elements"
        return None

    def described(self, settings: Mapping[str, Any], head_size: int) -> AttentionShape:
        """Return the variants of attention, with the heads of layers without a window."""
        usual = super().described(settings, head_size)
        return replace(usual, scale=1.0, wide=wide_heads(settings), value_norm=True)

    def part(self, shape: ModelShape, layer: int) -> AttentionPart:
        """Return the attention of one layer. Raises TypeError for sizes that other keys have read."""
        usual, described = super().part(shape, layer), shape.attention
        if not isinstance(described, AttentionShape) or described.wide is None:
            raise TypeError(f"these are not sizes of two kinds of heads: {described}")
        assert isinstance(usual, GroupedAttention)
        usual = replace(usual, value_norm=True)
        if described.window(layer) is not None:
            return usual
        wide = described.wide
        return replace(
            usual,
            head_size=wide.size,
            num_kv_heads=wide.num_kv,
            values_are_keys=wide.values_are_keys,
            kv_heads_key=KV_HEADS,
        )


def _are_sizes(own: object) -> bool:
    if not isinstance(own, Mapping) or not own.keys() <= set(OWN):
        return False
    return all(type(size) is int and size >= 1 for size in own.values())


def wide_heads(settings: Mapping[str, Any]) -> WideHeads:
    """Heads of the layers without a window, of settings with the family's defaults."""
    shared = bool(settings.get(SHARED))
    usual = {key: settings[key] for key in OWN}
    given = settings.get(OF_LAYERS)
    if given is not None:
        sizes = usual | dict(next(iter(given.values()), {}))
    else:
        own_heads = settings.get(KV_HEADS) if shared else None
        sizes = {
            "head_dim": settings.get(SIZE) or DEFAULT_SIZE,
            "num_key_value_heads": own_heads or usual["num_key_value_heads"],
        }
    return WideHeads(sizes["head_dim"], sizes["num_key_value_heads"], shared)
