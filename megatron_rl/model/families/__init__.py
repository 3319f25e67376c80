"""The supported Hugging Face architectures, described once, as data that needs no torch.

Preflight, the model builder, import, export and the rollout binding all read the same description. A family is one
entry in `registry.py`.
"""

from megatron_rl.model.families.attention_parts import AttentionShape, LatentAttention, attention_shape, rotary_share
from megatron_rl.model.families.family import Family
from megatron_rl.model.families.params import (
    CORRECTION,
    HEAD,
    VOCAB_PADDING,
    Constant,
    ParamSpec,
    constant_map,
    param_map,
    value_param_map,
)
from megatron_rl.model.families.registry import FAMILIES, REWARD_FAMILIES, family_of, is_reward_model
from megatron_rl.model.families.rope import rope_of, rope_problem, rope_type, ropes_of, softmax_growth
from megatron_rl.model.families.shape import (
    ModelShape,
    Routing,
    dense_layers_problem,
    experts_of,
    full_attention,
    head_cap,
    num_experts_key,
    num_labels,
    rollout_settings,
    routed_layers,
    routing_problem,
    sliding_window,
)

__all__ = [
    "CORRECTION",
    "AttentionShape",
    "head_cap",
    "attention_shape",
    "rotary_share",
    "Constant",
    "LatentAttention",
    "constant_map",
    "rollout_settings",
    "routed_layers",
    "routing_problem",
    "softmax_growth",
    "FAMILIES",
    "HEAD",
    "REWARD_FAMILIES",
    "VOCAB_PADDING",
    "Family",
    "ModelShape",
    "ParamSpec",
    "Routing",
    "dense_layers_problem",
    "family_of",
    "full_attention",
    "is_reward_model",
    "experts_of",
    "num_experts_key",
    "num_labels",
    "param_map",
    "rope_of",
    "rope_problem",
    "rope_type",
    "ropes_of",
    "sliding_window",
    "value_param_map",
]
