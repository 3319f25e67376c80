"""One model as its parts: family, sizes, layers, parameters and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_rl.model.families.family import Family
from megatron_rl.model.families.mtp_params import mtp_constants, mtp_map
from megatron_rl.model.families.params import constant_map, layers_of, param_map, value_param_map
from megatron_rl.model.families.registry import family_of, text_settings
from megatron_rl.model.families.shape import shape_of
from megatron_rl.model.families.vision import ImageForm, image_form
from megatron_rl.model.parts import Attention, AttentionPart, Constant, Layer, MixedAttention, ModelShape, ParamSpec
from megatron_rl.parallel.sharding import LogicalTensor


@dataclass(frozen=True)
class Model:
    """One model: its family and its sizes. Everything else follows from the parts that the family composes.

    has_mtp: its multi-token prediction layer is read, too (`mtp_params.py`); a value model has none. images: how it
    reads images; None: it reads text alone.
    """

    family: Family
    shape: ModelShape
    has_mtp: bool = False
    images: ImageForm | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Model:
        """Read the settings of a config.json; absent ones have the family's defaults.

        Raises ConfigError for an unknown architecture.
        """
        settings = text_settings(settings)
        return cls(family_of(settings["architectures"]), shape_of(settings), images=image_form(settings))

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers, in order."""
        return layers_of(self.family, self.shape)

    @cached_property
    def kinds(self) -> dict[Layer, int]:
        """Kind of layer -> how many there are."""
        return dict(Counter(self.layers))

    @cached_property
    def attention(self) -> Attention:
        """The attention of all layers, together where they differ."""
        kinds = self.attentions
        return MixedAttention(kinds) if len(kinds) > 1 else kinds[0]

    @property
    def attentions(self) -> tuple[AttentionPart, ...]:
        """The different attentions of its layers, in their order."""
        return tuple(dict.fromkeys(layer.attention for layer in self.layers))

    @cached_property
    def specs(self) -> dict[str, ParamSpec]:
        """Megatron name (layers counted over the whole model) -> spec, of the language model."""
        return param_map(self.family, self.shape) | mtp_specs(self)

    @cached_property
    def tower_specs(self) -> dict[str, ParamSpec]:
        """Megatron name -> spec of its vision tower where that is trained; {} for a model that reads text alone."""
        return {} if self.images is None else self.images.tower_specs

    @cached_property
    def value_specs(self) -> dict[str, ParamSpec]:
        """`specs` of the value model: the trunk and a head of one value."""
        return value_param_map(self.family, self.shape)

    @cached_property
    def constants(self) -> dict[str, Constant]:
        """Megatron name -> tensor that training reads and never changes."""
        return constant_map(self.family, self.shape)

    @cached_property
    def num_params(self) -> int:
        """Parameters of the language model without padding; a tied matrix counts once."""
        return sum(tensor.numel for tensor in tensors_of(self.specs).values())

    @cached_property
    def num_expert_params(self) -> int:
        """Parameters of experts, of which a token uses experts_per_token / num_experts."""
        return sum(tensor.numel for tensor in tensors_of(self.specs).values() if tensor.is_expert)

    @property
    def num_active_params(self) -> int:
        """Parameters that one token uses: of the experts only those that it is routed to."""
        experts, shape = self.num_expert_params, self.shape
        used = experts * shape.experts_per_token // shape.num_experts if experts else 0
        return self.num_params - experts + used

    @property
    def query_columns(self) -> int:
        """Columns of queries of all layers: products of one token with L keys take 2 L of this, forward."""
        return sum(number * layer.attention.query_columns for layer, number in self.kinds.items())

    def cached_elements(self, tp_size: int) -> int:
        """Elements of one token in the rollout engine's cache, on one of `tp_size` ranks."""
        layers = Counter(self.kinds) + Counter([self.layers[-1]] if self.has_mtp else [])
        return sum(number * layer.attention.cached_elements(tp_size) for layer, number in layers.items())

    @property
    def attention_parity(self) -> float:
        """The length L at which causal attention, 2 L A FLOPs per token and layer, costs as much as the matrices, 2 P.

        A: columns of all queries; P: elements of the matrices that a token passes in a layer; means over the layers.
        """
        matrices = sum(number * layer.token_elements for layer, number in self.kinds.items())
        return matrices / self.query_columns


def tensors_of(specs: Mapping[str, ParamSpec]) -> dict[str, LogicalTensor]:
    """Return name -> logical tensor of a model; a tied matrix once."""
    return {spec.tensor.name: spec.tensor for spec in specs.values()}


def mtp_specs(model: Model) -> dict[str, ParamSpec]:
    """`Model.specs` of the multi-token prediction layer alone; {} where it is not read."""
    return mtp_map(model.family, model.shape) if model.has_mtp else {}


def mtp_constants_of(model: Model) -> dict[str, Constant]:
    """Megatron name -> tensor of that layer that no update changes. Exports carry them."""
    return mtp_constants(model.family, model.shape) if model.has_mtp else {}
