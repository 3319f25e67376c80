"""What a family's description puts into a layer in the place of the usual attention and the usual router."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rl.model.families import LatentAttention, Routing, family_of, rope_type, softmax_growth
from megatron_rl.model.grouped_router import GroupedRouter
from megatron_rl.model.latent_attention import LatentSelfAttention


def put_attention(layer: ModuleSpec, hf_config: PretrainedConfig) -> None:
    """Latent attention, where the family has it. The rotary embedding must be a supported one."""
    settings = hf_config.to_dict()
    if not family_of(hf_config.architectures).latent_attention:
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
    """A router that scores in groups, where the family has it. block: the submodules of a layer's experts."""
    routing = Routing.from_hf(family_of(hf_config.architectures), hf_config.to_dict())
    if routing.scoring is not None:
        block.router = partial(GroupedRouter, routing=routing)
