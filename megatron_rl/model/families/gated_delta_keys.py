"""What config.json says of layers of linear attention by the gated delta rule among layers of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megatron_rl.model.families.attention_keys import GLOBAL, AttentionKeys, kinds_by_period
from megatron_rl.model.parts import AttentionPart, AttentionShape, GatedDelta, ModelShape
from megatron_rl.model.parts.gated_delta import KEY_HEADS, SIZE_KEYS, VALUE_HEADS

LINEAR = "linear_attention"
"""config.json's name of a layer of linear attention."""


@dataclass(frozen=True)
class MixedShape(AttentionShape):
    """One model's attention, with the part of its linear layers. linear: of every layer, whether it is one."""

    delta: GatedDelta | None = None
    linear: tuple[bool, ...] = ()


@dataclass(frozen=True)
class GatedDeltaKeys(AttentionKeys):
    """Keys of models in which only some layers attend to all positions, with a gate on what they response.

    interleaved: how a folder has the projections of linear layers, see `GatedDelta`. Without `layer_types` every
    `period`-th layer is one of full attention, by `period_key`.
    """

    interleaved: bool = False

    size_keys: ClassVar[tuple[str, ...]] = SIZE_KEYS
    other_kinds: ClassVar[frozenset[str]] = frozenset({LINEAR})

    def described(self, settings: Mapping[str, Any], head_size: int) -> AttentionShape:
        """Return the variants of full attention, and with them the linear layers."""
        usual = replace(super().described(settings, head_size), gated=True)
        delta = GatedDelta.from_hf(settings, self.interleaved)
        linear = tuple(kind == LINEAR for kind in self.kinds_of_layers(settings))
        return MixedShape(**vars(usual), delta=delta, linear=linear)

    def kinds_of_layers(self, settings: Mapping[str, Any]) -> list[str]:
        """The kind of every layer, by config.json's names."""
        return list(settings.get("layer_types") or kinds_by_period(self, settings, LINEAR))

    def problem(self, settings: Mapping[str, Any]) -> tuple[dict[str, Any], str] | None:
        """Heads of values share those of keys evenly, every layer has a kind, and some a cache that grows."""
        keys, values, number = settings[KEY_HEADS], settings[VALUE_HEADS], settings["num_hidden_layers"]
        kinds = self.kinds_of_layers(settings)
        if len(kinds) != number:
            return {"layer_types": kinds}, f"must name the kind of each of the {number} layers"
        if values % keys:
            return {VALUE_HEADS: values}, f"must be a multiple of {KEY_HEADS}({keys})"
        if GLOBAL not in kinds:
            given = {key: settings[key] for key in ("layer_types", self.period_key) if key and settings.get(key)}
            return given, f"must leave at least one layer of {GLOBAL}: the size of the engine's blocks follows from it"
        return None

    def part(self, shape: ModelShape, layer: int) -> AttentionPart:
        """Raises TypeError for sizes that other keys have read."""
        if not isinstance(shape.attention, MixedShape) or shape.attention.delta is None:
            raise TypeError(f"these are not sizes of linear attention: {shape.attention}")
        return shape.attention.delta if shape.attention.linear[layer] else super().part(shape, layer)
