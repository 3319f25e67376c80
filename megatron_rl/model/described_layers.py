"""Build attention, norms, embedding and router of a model as its family describes them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rl.errors import ConfigError
from megatron_rl.model.families import (
    LatentAttention,
    ModelShape,
    Routing,
    family_of,
    rope_problem,
    rope_type,
    ropes_of,
    rotary_share,
    softmax_growth,
)
from megatron_rl.model.families.family import Style
from megatron_rl.model.grouped_router import GroupedRouter
from megatron_rl.model.latent_attention import LatentSelfAttention
from megatron_rl.model.norm import RMSNorm, ZeroCentredNorm
from megatron_rl.model.router_balance import BalancedRouter


def norm_of(style: Style) -> type[RMSNorm]:
    """The norm of a family's layers."""
    return ZeroCentredNorm if style.zero_centred_norms else RMSNorm


def put_attention(layer: ModuleSpec, hf_config: PretrainedConfig) -> None:
    """Put the family's attention into a layer: latent attention, or plain attention with the model's variants.

    The rotary embedding must be supported.
    """
    settings, family = hf_config.to_dict(), family_of(hf_config.architectures)
    if not family.latent_attention:
        attention, shape = layer.submodules.self_attention, ModelShape.from_hf(settings).attention
        norm_after = norm_of(family.style) if family.style.norms_after else None
        attention.params = {**attention.params, "shape": shape, "norm_after": norm_after}
        attention.submodules.core_attention.params = {"shape": shape}
        return
    kind, turn_scale = rope_type(settings), 1.0
    if kind != "default":
        _, turn_scale = ROPE_INIT_FUNCTIONS[kind](hf_config, device="cpu")
    sizes: dict[str, Any] = {
        "latent": LatentAttention.from_hf(settings),
        "growth": softmax_growth(settings),
        "turn_scale": turn_scale,
    }
    layer.submodules.self_attention = ModuleSpec(module=LatentSelfAttention, params=sizes)


def put_router(block: Any, hf_config: PretrainedConfig) -> None:
    """Put a router into a layer: a `BalancedRouter`, or a `GroupedRouter` if the family scores in groups. block: the
    submodules of the layer's experts.
    """
    routing = Routing.from_hf(family_of(hf_config.architectures), hf_config.to_dict())
    block.router = BalancedRouter if routing.scoring is None else partial(GroupedRouter, routing=routing)


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
    problem = rope_problem(settings, is_latent=family.latent_attention, keys=family.attention)
    if problem is not None:
        raise ConfigError(problem)
    turned = head_size
    if not family.latent_attention:
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
