"""Qwen3-Next and the language models of Qwen3.5: three layers of the gated delta rule to one of gated attention."""

from __future__ import annotations

from megatron_rl.model.families.family import STEP_RULE, Carried, Family, Style
from megatron_rl.model.families.gated_delta_keys import GatedDeltaKeys
from megatron_rl.model.families.known.qwen2 import NO_END
from megatron_rl.model.parts import Experts, SharedExperts

STYLE = Style(zero_centred_norms=True)
PERIOD_KEY = "full_attention_interval"
SHARED = SharedExperts("shared_expert", size_key="shared_expert_intermediate_size", gate="shared_expert_gate")
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

TEXT = (
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
# Published folders of Qwen3.5 also read images; their vision tower is passed through.
WITH_IMAGES = Carried(("model.visual.", AHEAD))
FAMILIES = (
    *TEXT,
    TEXT[1].within("Qwen3_5ForConditionalGeneration", "qwen3_5", carried=WITH_IMAGES, is_only_form=True),
    TEXT[2].within("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", carried=WITH_IMAGES, is_only_form=True),
)
