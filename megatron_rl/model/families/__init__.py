"""The supported Hugging Face architectures, described once, as data that needs no torch.

Preflight, the model builder, import, export and the rollout binding all read the same description. A family is one
small file here and one name in `registry.py`.
"""

from megatron_rl.model.families.family import Family
from megatron_rl.model.families.layers import dense_layers_problem
from megatron_rl.model.families.params import HEAD, VOCAB_PADDING, ParamSpec, param_map, value_param_map
from megatron_rl.model.families.registry import FAMILIES, REWARD_FAMILIES, family_of, is_reward_model
from megatron_rl.model.families.rope import rope_of, rope_problem, rope_type
from megatron_rl.model.families.shape import (
    ModelShape,
    Routing,
    experts_of,
    full_attention,
    num_experts_key,
    num_labels,
    sliding_window,
)

__all__ = [
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
    "sliding_window",
    "value_param_map",
]
