"""Build attention, norms, embedding and router of a model as its family describes them."""

from __future__ import annotations

from functools import partial, singledispatch
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rl.errors import ConfigError
from megatron_rl.model.attention import CausalAttention, StackedQKVSelfAttention
from megatron_rl.model.context_attention import ContextAttention
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
from megatron_rl.model.families.family import Style
from megatron_rl.model.grouped_router import GroupedRouter
from megatron_rl.model.latent_attention import LatentSelfAttention
from megatron_rl.model.norm import RMSNorm, ZeroCentredNorm
from megatron_rl.model.parts import ExpertsMLP, GatedDelta, GatedMLP, GroupedAttention, LatentAttention, LayerPart
from megatron_rl.model.router_balance import BalancedRouter


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
    attention.params = {**attention.params, "shape": shape, "norm_after": norm_after}
    core = ContextAttention if config.context_parallel_size > 1 else CausalAttention
    attention.submodules.core_attention = ModuleSpec(module=core, params={"shape": shape})
    if part.qk_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = norm_of(style)


@put_part.register
def put_latent_attention(
    part: LatentAttention, layer: ModuleSpec, config: TransformerConfig, hf_config: PretrainedConfig
) -> None:
    """Put latent attention into a layer. The rotary embedding must be supported."""
    settings = hf_config.to_dict()
    kind, turn_scale = rope_type(settings), 1.0
    if kind != "default":
        _, turn_scale = ROPE_INIT_FUNCTIONS[kind](hf_config, device="cpu")
    sizes: dict[str, Any] = {"latent": part, "growth": softmax_growth(settings), "turn_scale": turn_scale}
    layer.submodules.self_attention = ModuleSpec(module=LatentSelfAttention, params=sizes)


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
    """Put stacked experts into a layer, with a `BalancedRouter`, or a `GroupedRouter` where scores are in groups."""
    routing = Routing.from_hf(family_of(hf_config.architectures), hf_config.to_dict())
    block = moe_submodules(layer.submodules.mlp)
    block.experts = StackedExperts
    block.shared_experts.module = SharedExpertsLayer
    block.router = BalancedRouter if routing.scoring is None else partial(GroupedRouter, routing=routing)


def moe_submodules(mlp: Any) -> Any:
    """The submodules of a layer with experts, which is a `partial` in newer versions of Megatron and a spec in
    older.
    """
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules


def scale_embedding(model: GPTModel, style: Style) -> None:
    """Multiply embeddings by the square root of the hidden size, in the model's dtype, if the family does."""
    if not style.scaled_embedding or not model.pre_process:
        return
    scale = torch.tensor(model.config.hidden_size**0.5, dtype=model.config.params_dtype).item()

    def scaled(module: Any, given: Any, out: torch.Tensor) -> torch.Tensor:
        return out * scale

    model.embedding.register_forward_hook(scaled)


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
    return torch.cat([_frequencies(hf_config, rope, turned, kind) for kind, rope in ropes.items()])


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
