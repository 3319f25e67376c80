"""The map between Megatron's parameters, the rollout engine's and the tensors of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from megatron_rl.model.families.family import Family, Inside
from megatron_rl.model.parts import Constant, ExpertsMLP, GatedMLP, Layer, LayerPart, ModelShape, ParamSpec
from megatron_rl.model.parts.param_spec import vocab_matrix, whole

VOCAB_PADDING = 64
"""vLLM pads vocabularies to a multiple of this; it is also training's default."""

EMBEDDING = "embedding.word_embeddings.weight"
"""Megatron's name of the vocabulary's vectors."""
HEAD = "output_layer.weight"
"""Megatron's name of the weight of a vocabulary head and of a value head."""

EIGHT_BIT_LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Megatron's names of the linears of attention and dense MLPs, whose products can be in FP8."""
OWN_EIGHT_BIT_LINEARS = ("linear_down", "linear_q", "linear_q_up", "linear_kv_up", "linear_qkvz")
"""The same of latent attention and the gated delta rule, whose linear_ba, of few columns, stays in the training dtype,
as in Qwen's own FP8 folders."""
EIGHT_BIT_STACKS = ("w13", "w2")
KEPT_IN_ENGINE = ("linear_kv_up",)
"""Linears that generation does not read in FP8: vLLM's attention multiplies with two parts of the unrounded weight."""


def is_in_eight_bits(name: str) -> bool:
    """Whether a parameter, by its name in Megatron, is the weight of a linear that transformer-engine can compute in
    FP8, in any attention and in dense MLPs, not in experts.
    """
    *parents, linear, kind = name.split(".")
    is_linear = kind == "weight" and linear in (*EIGHT_BIT_LINEARS, *OWN_EIGHT_BIT_LINEARS)
    return is_linear and not {"experts", "shared_experts"} & set(parents)


def is_emulated(name: str) -> bool:
    """Whether products with a parameter can be emulated in FP8: as `is_in_eight_bits`, and of shared experts and stacks
    of experts. As DeepSeek-V3 does, embedding, head, router and norms are not.
    """
    *parents, owner, kind = name.split(".")
    is_stack = owner == "experts" and kind in EIGHT_BIT_STACKS
    return is_stack or is_in_eight_bits(".".join([*(one for one in parents if one != "shared_experts"), owner, kind]))


def eight_bit_names(specs: Mapping[str, ParamSpec]) -> set[str]:
    """The rollout engine's names of the weights that it can read as FP8 weights: linears of attention, MLPs and
    shared experts, and stacked experts, those of an MTP layer included.
    """
    return {spec.tensor.name for name, spec in specs.items() if _is_stack(spec) or _is_linear(name)}


def _is_stack(spec: ParamSpec) -> bool:
    """Whether it is a stack of matrices of experts, and not of their biases."""
    return spec.tensor.is_expert and len(spec.tensor.segments[0].shape) > 2


def _is_linear(name: str) -> bool:
    *_, linear, kind = name.split(".")
    read = {*EIGHT_BIT_LINEARS, *OWN_EIGHT_BIT_LINEARS} - {*KEPT_IN_ENGINE}
    return kind == "weight" and linear in read


@lru_cache(maxsize=16)
def layers_of(family: Family, shape: ModelShape) -> tuple[Layer, ...]:
    """Compose the layers of a model of their parts, in order. Kept, as all that reads a model asks for them."""
    shape = replace(shape, qkv_bias=family.qkv_bias or shape.qkv_bias, qk_norm=family.qk_norm or shape.qk_norm)
    return tuple(
        Layer(
            shape.hidden_size,
            family.attention.part(shape, number),
            _mlp(family, shape, number),
            family.style.norms_after,
            family.style.layer_scales,
        )
        for number in range(shape.num_layers)
    )


def _mlp(family: Family, shape: ModelShape, number: int) -> LayerPart:
    if family.experts is None:
        return GatedMLP(shape.hidden_size, shape.ffn_size)
    if number in shape.dense_layers:
        return GatedMLP(shape.hidden_size, shape.dense_ffn_size)
    routed = (shape.ffn_size, shape.num_experts, shape.experts_per_token, shape.shared_size)
    return ExpertsMLP(shape.hidden_size, *routed, family.experts)


def param_map(family: Family, shape: ModelShape) -> dict[str, ParamSpec]:
    """Megatron name (layers counted over the whole model) -> spec, for every parameter of the language model.

    In the order of the layers, the embedding first.
    """
    params = {name: engine_named(spec, family.engine_names) for name, spec in _folder_named(family, shape).items()}
    return params if family.inside is None else _named_inside(params, family.inside)


def engine_named(spec: ParamSpec, names: Mapping[str, str]) -> ParamSpec:
    """The spec with vLLM's names of modules in its tensor's name."""
    if not names:
        return spec
    name = ".".join(names.get(module, module) for module in spec.tensor.name.split("."))
    return replace(spec, tensor=replace(spec.tensor, name=name))


def _folder_named(family: Family, shape: ModelShape) -> dict[str, ParamSpec]:
    """`param_map`, with the folder's names of modules."""
    embedding = vocab_matrix("model.embed_tokens.weight", shape.vocab_size, shape.hidden_size)
    head = embedding if shape.tied else vocab_matrix("lm_head.weight", shape.vocab_size, shape.hidden_size)
    params = {EMBEDDING: embedding}
    for number, layer in enumerate(layers_of(family, shape)):
        params |= layer.params(*_prefixes(number))
    return params | {"decoder.final_layernorm.weight": whole("model.norm.weight", (shape.hidden_size,)), HEAD: head}


def _named_inside(params: Mapping[str, ParamSpec], inside: Inside) -> dict[str, ParamSpec]:
    """Give the tensors of a language model the names that they have in a larger one."""
    return {
        name: replace(
            spec,
            tensor=replace(spec.tensor, name=inside.in_engine(spec.tensor.name)),
            hf_names=tuple(map(inside.in_folder, spec.hf_names)),
        )
        for name, spec in params.items()
    }


def value_param_map(family: Family, shape: ModelShape) -> dict[str, ParamSpec]:
    """`param_map` of a value model: the trunk, and the one-label head of a reward model's folder."""
    trunk = param_map(family, replace(shape, tied=False))
    return trunk | {HEAD: whole("score.weight", (1, shape.hidden_size))}


def classifier_map(family: Family, shape: ModelShape, with_tower: bool = False) -> dict[str, ParamSpec]:
    """`value_param_map` under the names of an exported classifier. with_tower: see `Family.classifier`."""
    return value_param_map(family.classifier(with_tower), shape)


def constant_map(family: Family, shape: ModelShape) -> dict[str, Constant]:
    """Megatron name -> tensor that training reads and no update changes; {} in most families.

    Raises ValueError if there are some inside a larger model: a constant has one name for folder and engine.
    """
    constants: dict[str, Constant] = {}
    for number, layer in enumerate(layers_of(family, shape)):
        constants |= layer.constants(*_prefixes(number))
    if constants and family.inside is not None:
        raise ValueError(f"{family.architecture} has constants inside: {', '.join(constants)}")
    return constants


def _prefixes(number: int) -> tuple[str, str]:
    """Prefixes of a layer's names in Megatron and in a Hugging Face folder."""
    return f"decoder.layers.{number}.", f"model.layers.{number}."
