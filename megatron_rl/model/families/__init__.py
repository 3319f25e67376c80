"""The supported Hugging Face architectures, described once, as data that needs no torch.

Preflight, the model builder, import, export and the rollout binding all read the same description. A family is one
entry in a file of `known/`.
"""

from megatron_rl.model.families.attention_keys import attention_shape, kinds_by_period, rotary_share
from megatron_rl.model.families.family import LAYER, Family
from megatron_rl.model.families.model import Model, mtp_constants_of, mtp_specs, tensors_of
from megatron_rl.model.families.params import (
    HEAD,
    VOCAB_PADDING,
    classifier_map,
    constant_map,
    eight_bit_names,
    is_emulated,
    is_in_eight_bits,
    param_map,
    value_param_map,
)
from megatron_rl.model.families.refused import refusal_of
from megatron_rl.model.families.registry import (
    FAMILIES,
    KNOWN_TYPES,
    REWARD_FAMILIES,
    family_of,
    inside_of,
    is_reward_model,
    text_settings,
)
from megatron_rl.model.families.rope import rope_of, rope_problem, rope_type, ropes_of, softmax_growth
from megatron_rl.model.families.shape import (
    Routing,
    dense_layers_problem,
    experts_of,
    full_attention,
    head_cap,
    num_experts_key,
    num_labels,
    placed_settings,
    rollout_settings,
    routed_layers,
    routing_of,
    routing_problem,
    shape_of,
    sliding_window,
)
from megatron_rl.model.families.vision import ImageForm, image_form, tower_of, without_tower
from megatron_rl.model.parts import (
    CORRECTION,
    AttentionShape,
    Constant,
    LatentAttention,
    ModelShape,
    ParamSpec,
    is_one_by_one,
)

__all__ = [
    "CORRECTION",
    "eight_bit_names",
    "is_emulated",
    "is_in_eight_bits",
    "AttentionShape",
    "head_cap",
    "attention_shape",
    "rotary_share",
    "Constant",
    "LatentAttention",
    "classifier_map",
    "constant_map",
    "rollout_settings",
    "routed_layers",
    "routing_of",
    "routing_problem",
    "softmax_growth",
    "FAMILIES",
    "HEAD",
    "KNOWN_TYPES",
    "LAYER",
    "REWARD_FAMILIES",
    "VOCAB_PADDING",
    "Family",
    "Model",
    "mtp_constants_of",
    "mtp_specs",
    "ModelShape",
    "ParamSpec",
    "Routing",
    "dense_layers_problem",
    "family_of",
    "full_attention",
    "is_one_by_one",
    "kinds_by_period",
    "is_reward_model",
    "inside_of",
    "text_settings",
    "placed_settings",
    "experts_of",
    "num_experts_key",
    "num_labels",
    "param_map",
    "refusal_of",
    "rope_of",
    "rope_problem",
    "rope_type",
    "ropes_of",
    "sliding_window",
    "shape_of",
    "tensors_of",
    "value_param_map",
    "ImageForm",
    "image_form",
    "tower_of",
    "without_tower",
]
