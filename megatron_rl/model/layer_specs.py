"""Build attention, norms, embedding and router of a model as its family describes them."""

from __future__ import annotations

from functools import partial, singledispatch
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rl.errors import ConfigError
from megatron_rl.model.attention import BiasedRowParallelLinear, StackedQKVSelfAttention
from megatron_rl.model.biased_experts import BiasedExperts
from megatron_rl.model.context_attention import ContextAttention
from megatron_rl.model.decoder import Chunk, embedding_of, layers_of
from megatron_rl.model.delta_attention import GatedDeltaAttention
from megatron_rl.model.experts import SharedExpertsLayer, StackedExperts
from megatron_rl.model.families import (
    Routing,
    family_of,
    rope_problem,
    rope_type,
    ropes_of,
    rotary_share,
    shape_of,
    softmax_growth,
)
from megatron_rl.model.families.attention_keys import GLOBAL
from megatron_rl.model.families.family import Style
from megatron_rl.model.grouped_router import GroupedRouter
from megatron_rl.model.latent_attention import LatentSelfAttention
from megatron_rl.model.norm import RMSNorm, ZeroCentredNorm
from megatron_rl.model.parts import (
    AttentionShape,
    ExpertsMLP,
    GatedDelta,
    GatedMLP,
    GroupedAttention,
    LatentAttention,
    LayerPart,
    SinkAttention,
)
from megatron_rl.model.parts.layer import SCALE
from megatron_rl.model.router_balance import BalancedRouter, BiasedRouter


def norm_of(style: Style) -> type[RMSNorm]:
    """The norm of a family's layers."""
    return ZeroCentredNorm if style.zero_centred_norms else RMSNorm


@singledispatch
def put_part(part: LayerPart, layer: ModuleSpec, config: TransformerConfig, hf_config: PretrainedConfig) -> None:
    """Put the module of a part into a layer. A new kind of part registers a function of its own."""
    raise NotImplementedError(f"{type(part).__name__} has no module: register one with put_part.register")


@put_part.register
def put_grouped_attention(
    part: GroupedAttention, layer: ModuleSpec, config: TransformerConfig, hf_config: PretrainedConfig
) -> None:
    """Put plain attention with the model's variants into a layer."""
    settings, style = hf_config.to_dict(), family_of(hf_config.architectures).style
    shape, attention = shape_of(settings).attention, layer.submodules.self_attention
    norm_after = norm_of(style) if style.norms_after else None
    attention.module = StackedQKVSelfAttention
    own = {"shape": shape, "part": part, "norm_after": norm_after, "turn_scale": turn_scale(hf_config)}
    attention.params = {**attention.params, **own}
    attention.submodules.core_attention = ModuleSpec(module=ContextAttention, params={"shape": shape})
    if part.qk_norm and not part.joint_norms:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = norm_of(style)


@put_part.register
def put_sink_attention(
    part: SinkAttention, layer: ModuleSpec, config: TransformerConfig, hf_config: PretrainedConfig
) -> None:
    """Put attention with sinks into a layer, whose output has a bias."""
    put_grouped_attention(part, layer, config, hf_config)
    layer.submodules.self_attention.submodules.linear_proj = BiasedRowParallelLinear


@put_part.register
def put_latent_attention(
    part: LatentAttention, layer: ModuleSpec, config: TransformerConfig, hf_config: PretrainedConfig
) -> None:
    """Put latent attention into a layer. The rotary embedding must be supported."""
    sizes: dict[str, Any] = {"latent": part, "growth": softmax_growth(hf_config.to_dict())}
    sizes["turn_scale"] = turn_scale(hf_config)
    layer.submodules.self_attention = ModuleSpec(module=LatentSelfAttention, params=sizes)


def turn_scale(hf_config: PretrainedConfig) -> float:
    """Factor of cosine and sine of the rotary embedding, as transformers computes it; 1 but for yarn."""
    settings = hf_config.to_dict()
    family = family_of(hf_config.architectures or ["LlamaForCausalLM"])
    kind = rope_type(settings)
    if kind == "default" or kind not in family.attention.rope_types or ropes_of(family.attention, settings):
        return 1.0
    scale: float
    _, scale = ROPE_INIT_FUNCTIONS[kind](hf_config, device="cpu")
    return scale


@put_part.register
def put_gated_delta(
    part: GatedDelta, layer: ModuleSpec, config: TransformerConfig, hf_config: PretrainedConfig
) -> None:
    """Put linear attention by the gated delta rule into a layer."""
    layer.submodules.self_attention = ModuleSpec(module=GatedDeltaAttention, params={"delta": part})


@put_part.register
def put_mlp(part: GatedMLP, layer: ModuleSpec, config: TransformerConfig, hf_config: PretrainedConfig) -> None:
    """Megatron's MLP stays; `gate_sparingly` gives it a gate of ours once it is built."""


@put_part.register
def put_experts(part: ExpertsMLP, layer: ModuleSpec, config: TransformerConfig, hf_config: PretrainedConfig) -> None:
    """Put stacked experts into a layer, and the router that their scores, or a bias of its logits, ask for."""
    routing = Routing.from_hf(family_of(hf_config.architectures), hf_config.to_dict())
    block = moe_submodules(layer.submodules.mlp)
    block.experts = StackedExperts if part.names.stacks is None else BiasedExperts
    block.shared_experts.module = SharedExpertsLayer
    plain = BiasedRouter if part.names.router_bias else BalancedRouter
    block.router = plain if routing.scoring is None else partial(GroupedRouter, routing=routing)


def moe_submodules(mlp: Any) -> Any:
    """The submodules of a layer with experts, which is a `partial` in newer versions of Megatron and a spec in
    older.
    """
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules


def scale_embedding(model: Chunk, style: Style) -> None:
    """Multiply embeddings by the square root of the hidden size, in the model's dtype, if the family does."""
    embedding = embedding_of(model)
    if not style.scaled_embedding or embedding is None:
        return
    scale = torch.tensor(model.config.hidden_size**0.5, dtype=model.config.params_dtype).item()

    def scaled(module: Any, given: Any, out: torch.Tensor) -> torch.Tensor:
        return out * scale

    embedding.register_forward_hook(scaled)


def scale_layers(model: Chunk, style: Style) -> None:
    """Multiply each layer's output by its `layer_scalar`, a buffer that the folder fills, if the family does."""
    if not style.layer_scales:
        return

    def scaled(layer: Any, given: Any, out: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        return out[0] * getattr(layer, SCALE).to(out[0].dtype), out[1]

    for _, layer in layers_of(model):
        layer.register_buffer(SCALE, torch.ones(1))
        layer.register_forward_hook(scaled)


def rotary_frequencies(hf_config: PretrainedConfig, head_size: int) -> torch.Tensor:
    """Inverse frequencies of the rotary embedding, float32 [turned / 2], as transformers computes them.

    With two embeddings both are concatenated, that of layers without a window first. Megatron's own scaling has fixed
    numbers of Llama 3.1. head_size: size of a head; in latent attention of its rotated part. Raises ConfigError for a
    type that is not supported.
    """
    settings = hf_config.to_dict()
    family = family_of(hf_config.architectures or ["LlamaForCausalLM"])
    problem = rope_problem(settings, family.attention)
    if problem is not None:
        raise ConfigError(problem)
    turned = int(head_size * rotary_share(family.attention, settings))
    ropes = ropes_of(family.attention, settings)
    if not ropes:
        return _frequencies(hf_config, hf_config.rope_parameters, turned, None)
    shape = shape_of(settings).attention
    assert isinstance(shape, AttentionShape)
    sizes = dict.fromkeys(ropes, shape.turned)
    if shape.wide is not None:
        sizes[GLOBAL] = shape.wide.size
    return torch.cat([_frequencies(hf_config, rope, sizes[kind], kind) for kind, rope in ropes.items()])


def _frequencies(hf_config: PretrainedConfig, rope: Any, turned: int, kind: str | None) -> torch.Tensor:
    """Frequencies of one rotary embedding; kind: of its layers, if there are two embeddings, else None."""
    name = rope_type({"rope_parameters": rope})
    if name == "default":
        exponents = torch.arange(0, turned, 2, dtype=torch.float32) / turned
        theta: float = rope["rope_theta"]
        return 1.0 / theta**exponents
    layers = {} if kind is None else {"layer_type": kind}
    frequencies: torch.Tensor
    frequencies, _ = ROPE_INIT_FUNCTIONS[name](hf_config, device="cpu", **layers)
    return frequencies
