"""The multi-token prediction (MTP) layer behind a model's layers: its parameters in Megatron, folder and engine.

It drafts the token after the next from a token's last hidden state and the next token's embedding
(DeepSeek-V3, arXiv:2412.19437, section 2.2): both are normalised and projected together, and one more layer, a norm and
the model's own head follow.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.model.families.family import Family
from megatron_rl.model.families.params import engine_named, layers_of
from megatron_rl.model.parts import Constant, Layer, ModelShape, ParamSpec
from megatron_rl.model.parts.param_spec import whole

MTP = "mtp_layer."
"""Megatron's names of its parameters begin so."""
BLOCK = "mtp_block."
"""The engine's name of the layer inside."""


def mtp_layer(family: Family, shape: ModelShape) -> Layer:
    """The layer inside: the one that would come after the last, of the last one's kind."""
    return layers_of(family, shape)[-1]


def mtp_map(family: Family, shape: ModelShape) -> dict[str, ParamSpec]:
    """Megatron name -> spec of the MTP layer's own parameters. Embedding and head are the model's."""
    hidden, folder = shape.hidden_size, f"model.layers.{shape.num_layers}."
    inside = mtp_layer(family, shape).params(f"{MTP}transformer_layer.", folder)
    return {
        f"{MTP}enorm.weight": whole(f"{folder}enorm.weight", (hidden,)),
        f"{MTP}hnorm.weight": whole(f"{folder}hnorm.weight", (hidden,)),
        f"{MTP}eh_proj.weight": whole(f"{folder}eh_proj.weight", (hidden, 2 * hidden)),
        **{name: _in_block(engine_named(spec, family.engine_names), folder) for name, spec in inside.items()},
        f"{MTP}final_layernorm.weight": whole(f"{folder}shared_head.norm.weight", (hidden,)),
    }


def mtp_constants(family: Family, shape: ModelShape) -> dict[str, Constant]:
    """Megatron name -> tensor of the folder that the layer reads and no update changes."""
    return mtp_layer(family, shape).constants(f"{MTP}transformer_layer.", f"model.layers.{shape.num_layers}.")


def engine_name(constant: Constant) -> str:
    """The engine's name of one of `mtp_constants`."""
    model, layers, number, rest = constant.name.split(".", 3)
    return f"{model}.{layers}.{number}.{BLOCK}{rest}"


def _in_block(spec: ParamSpec, prefix: str) -> ParamSpec:
    tensor = spec.tensor
    return replace(spec, tensor=replace(tensor, name=f"{prefix}{BLOCK}{tensor.name.removeprefix(prefix)}"))
