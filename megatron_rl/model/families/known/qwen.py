"""Qwen's models, by Alibaba: dense, with experts, with the gated delta rule, and with a vision tower."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.model.families.family import STEP_RULE, Carried, Family, Style, Tower, Window
from megatron_rl.model.families.gated_delta_keys import GatedDeltaKeys
from megatron_rl.model.parts import Experts, SharedExperts

WINDOW = Window(switch="use_sliding_window", default=4096)
SHARED = SharedExperts("shared_expert", size_key="shared_expert_intermediate_size", gate="shared_expert_gate")
NO_END = {"eos_token_id": None}

QWEN2 = (
    # Qwen2 and Qwen2.5.
    Family("Qwen2ForCausalLM", "Qwen2ForSequenceClassification", qkv_bias=True, window=WINDOW, defaults=NO_END),
    # Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, and a gated MLP for every token next to the experts.
    Family(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeForSequenceClassification",
        qkv_bias=True,
        experts=Experts(
            dense_keys=STEP_RULE,
            shared=SHARED,
        ),
        window=WINDOW,
        defaults=NO_END,
        fixed={"qkv_bias": True},
    ),
)

QWEN3 = (
    # Qwen3, dense.
    Family("Qwen3ForCausalLM", "Qwen3ForSequenceClassification", qk_norm=True, window=WINDOW, defaults=NO_END),
    # Qwen3 with experts, in all layers or in those that config.json names.
    Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeForSequenceClassification",
        qk_norm=True,
        experts=Experts(dense_keys=STEP_RULE),
        window=WINDOW,
        defaults=NO_END | {"num_key_value_heads": 4},
    ),
)

# Qwen3-Next and the language models of Qwen3.5: three layers of the gated delta rule to one of gated attention.
STYLE = Style(zero_centred_norms=True)
PERIOD_KEY = "full_attention_interval"
DEFAULTS: dict[str, object] = NO_END | {
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
EXPERT_SIZES: dict[str, object] = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
AHEAD = "mtp."
"""What the names of multi-token prediction layers begin with."""
# vLLM reads settings which transformers does not have.
FIXED = {"attn_output_gate": True, "output_gate_type": "silu", "layer_scale": False}

GATED_DELTA = (
    # Qwen3-Next: projections of a head of keys lie together in a folder.
    Family(
        "Qwen3NextForCausalLM",
        "Qwen3NextForSequenceClassification",
        qk_norm=True,
        attention=GatedDeltaKeys(partial_rotary=0.25, period=4, period_key=PERIOD_KEY, interleaved=True),
        style=STYLE,
        experts=Experts(dense_keys=STEP_RULE, shared=SHARED),
        fixed=FIXED,
        carried=Carried((AHEAD,)),
        defaults=DEFAULTS
        | EXPERT_SIZES
        | {"num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
    ),
    # The language model of Qwen3.5, dense.
    Family(
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextForSequenceClassification",
        own_type="qwen3_5_text",
        qk_norm=True,
        attention=GatedDeltaKeys(partial_rotary=0.25, period=4, period_key=PERIOD_KEY),
        style=STYLE,
        fixed=FIXED,
        carried=Carried((AHEAD,)),
        defaults=DEFAULTS | {"num_key_value_heads": 4},
    ),
    # The same with experts in all layers.
    Family(
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextForSequenceClassification",  # which transformers does not have: only critics here start from one
        own_type="qwen3_5_moe_text",
        qk_norm=True,
        attention=GatedDeltaKeys(partial_rotary=0.25, period=4, period_key=PERIOD_KEY),
        style=STYLE,
        experts=Experts(norm_topk_prob=True, shared=SHARED),
        fixed=FIXED | {"mlp_only_layers": [], "norm_topk_prob": True},
        carried=Carried((AHEAD,)),
        defaults=DEFAULTS | EXPERT_SIZES | {"num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8},
    ),
)

# Models that also read images, of which the language model is trained; the vision tower is passed through.
VISUAL = "model.visual."
WITH_IMAGES = Carried((VISUAL, AHEAD))
MERGED = {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584}
VIT = MERGED | {"patch_size": 16, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304}
VIT |= {"num_position_embeddings": 2304}
QWEN2_5_TOWER = Tower(
    "qwen2_5_vl",
    "Qwen2_5_VisionTransformerPretrainedModel",
    "visual.",
    (151_655, 151_656),
    sections=(16, 24, 24),
    alternating=False,
    gated=True,
    defaults=MERGED
    | {"patch_size": 14, "depth": 32, "hidden_size": 3584, "intermediate_size": 3420}
    | {"window_size": 112, "fullatt_block_indexes": (7, 15, 23, 31)},
)
QWEN3_TOWER = Tower(
    "qwen3_vl",
    "Qwen3VLVisionModel",
    VISUAL,
    (151_655, 151_656),
    sections=(24, 20, 20),
    has_levels=True,
    defaults=VIT | {"deepstack_visual_indexes": (8, 16, 24)},
)
QWEN3_5_TOWER = Tower(
    "qwen3_5",
    "Qwen3_5VisionModel",
    VISUAL,
    (248_056, 248_057),
    sections=(11, 11, 10),
    defaults=VIT,
)
WITH_VISION = (
    # Qwen3.5, as it is published.
    GATED_DELTA[1].within(
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        carried=WITH_IMAGES,
        tower=QWEN3_5_TOWER,
        is_only_form=True,
    ),
    GATED_DELTA[2].within(
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        carried=WITH_IMAGES,
        tower=replace(QWEN3_5_TOWER, model="qwen3_5_moe", module="Qwen3_5MoeVisionModel"),
        is_only_form=True,
    ),
    # Qwen2.5-VL: Qwen2 under its own names, the vision tower next to it. Older folders have no text_config.
    QWEN2[0].within(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        carried=Carried(("visual.",)),
        tower=QWEN2_5_TOWER,
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "eos_token_id": 151_645},
        folder_prefix="model.",
    ),
    # Qwen3-VL, dense.
    replace(QWEN3[0], window=None).within(  # whatever its text_config says
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        carried=Carried((VISUAL,)),
        tower=QWEN3_TOWER,
        defaults={"rope_theta": 500_000.0},
    ),
    # Qwen3-VL with experts, whose folders have them in stacks.
    replace(
        replace(QWEN3[1], window=None).within(
            "Qwen3VLMoeForConditionalGeneration",
            "qwen3_vl_moe",
            carried=Carried((VISUAL,)),
            tower=replace(QWEN3_TOWER, model="qwen3_vl_moe", module="Qwen3VLMoeVisionModel"),
            defaults={"rope_theta": 500_000.0, "num_key_value_heads": 16},
        ),
        experts=Experts(dense_keys=STEP_RULE, norm_topk_prob=True, joined=True),
        fixed={"norm_topk_prob": True},
    ),
)

FAMILIES = (*QWEN2, *QWEN3, *GATED_DELTA, *WITH_VISION)
