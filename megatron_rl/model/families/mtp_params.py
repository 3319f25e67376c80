"""The multi-token prediction (MTP) layer behind a model's layers: its parameters in Megatron, folder and engine.

It drafts the token after the next from a token's last hidden state and the next token's embedding
(DeepSeek-V3, arXiv:2412.19437, section 2.2): both are normalised and projected together, and one more layer, a norm and
the model's own head follow. Families differ in names, and in the order of the projection's inputs (`MTPForm`).
"""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.model.families.family import Family, MTPForm
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


def mtp_form(family: Family) -> MTPForm:
    """The form of the family's layer. Raises ValueError if it has none that is read."""
    if family.carried.mtp is None:
        raise ValueError(f"{family.architecture} has no multi-token prediction layer that is read")
    return family.carried.mtp


def mtp_map(family: Family, shape: ModelShape) -> dict[str, ParamSpec]:
    """Megatron name -> spec of the MTP layer's own parameters. Embedding and head are the model's."""
    form, hidden = mtp_form(family), shape.hidden_size
    folder, engine = (place.format(layer=shape.num_layers) for place in (form.place, form.engine_place))
    inside = mtp_layer(family, shape).params(f"{MTP}transformer_layer.", folder)
    in_block = {name: engine_named(spec, family.engine_names) for name, spec in inside.items()}
    shapes = ((hidden,), (hidden,), (hidden, 2 * hidden), (hidden,))
    enorm, hnorm, projection, last_norm = (
        _renamed(whole(f"{folder}{name}.weight", size), folder, engine)
        for name, size in zip(form.names, shapes, strict=True)
    )
    return {
        f"{MTP}enorm.weight": enorm,
        f"{MTP}hnorm.weight": hnorm,
        f"{MTP}eh_proj.weight": projection,
        **{name: _renamed(spec, folder, engine + BLOCK) for name, spec in in_block.items()},
        f"{MTP}final_layernorm.weight": last_norm,
    }


def mtp_constants(family: Family, shape: ModelShape) -> dict[str, Constant]:
    """Megatron name -> tensor of the folder that the layer reads and no update changes."""
    folder = mtp_form(family).place.format(layer=shape.num_layers)
    return mtp_layer(family, shape).constants(f"{MTP}transformer_layer.", folder)


def engine_name(constant: Constant) -> str:
    """The engine's name of one of `mtp_constants`."""
    model, layers, number, rest = constant.name.split(".", 3)
    return f"{model}.{layers}.{number}.{BLOCK}{rest}"


def _renamed(spec: ParamSpec, folder: str, engine: str) -> ParamSpec:
    """The spec with another beginning of the engine's name."""
    tensor = spec.tensor
    return replace(spec, tensor=replace(tensor, name=engine + tensor.name.removeprefix(folder)))
