"""The supported families, one entry each, and how to find the family of a config.json.

To add a family, add one `Family(...)` to `ALL`.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_rl.errors import ConfigError
from megatron_rl.model.families.attention_keys import AttentionKeys, LatentKeys
from megatron_rl.model.families.family import STEP_RULE, Family, Style, Window, first_rule
from megatron_rl.model.parts import Experts, Scoring, SharedExperts

QWEN_WINDOW = Window(switch="use_sliding_window", default=4096)
NO_END = {"eos_token_id": None}
DEEPSEEK_SHARED = SharedExperts("shared_experts", size_key="moe_intermediate_size", count_key="n_shared_experts")
DEEPSEEK_BIAS = "gate.e_score_correction_bias"
GEMMA_STYLE = Style("gelu_pytorch_tanh", True, True, True, "final_logit_softcapping")
GEMMA_DEFAULTS = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}

ALL = (
    # DeepSeek-V2: latent attention, and experts chosen by softmax scores in groups.
    Family(
        "DeepseekV2ForCausalLM",
        "DeepseekV2ForSequenceClassification",
        attention=LatentKeys(),
        experts=Experts(
            count_keys=("n_routed_experts",),
            norm_topk_prob=False,
            dense_keys=first_rule(absent=0),
            shared=DEEPSEEK_SHARED,
            scoring=Scoring("softmax", best=1, method=("topk_method", "group_limited_greedy")),
        ),
        fixed={"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1},
        rollout={"scoring_func": "softmax"},
    ),
    # DeepSeek-V3 and Moonlight: latent attention, and experts chosen by sigmoid scores and a bias.
    Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3ForSequenceClassification",
        attention=LatentKeys(),
        experts=Experts(
            count_keys=("n_routed_experts",),
            dense_keys=first_rule(absent=3),
            shared=DEEPSEEK_SHARED,
            scoring=Scoring("sigmoid", best=2, bias=DEEPSEEK_BIAS, scale=2.5, normalised=True),
        ),
        fixed={
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "rope_interleave": True,
        },
        rollout={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        defaults={"eos_token_id": 1},
        ahead_key="num_nextn_predict_layers",
    ),
    # Gemma-2: windows in every second layer, bounded products and logits, norms around every part of a layer.
    Family(
        "Gemma2ForCausalLM",
        "Gemma2ForSequenceClassification",
        attention=AttentionKeys(scale="query_pre_attn_scalar", soft_cap="attn_logit_softcapping", local=True),
        style=GEMMA_STYLE,
        defaults=GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    # Gemma-3, the language models: five layers with windows and a rotary embedding of their own to one without.
    Family(
        "Gemma3ForCausalLM",
        "Gemma3TextForSequenceClassification",
        own_type="gemma3_text",
        qk_norm=True,
        attention=AttentionKeys(
            scale="query_pre_attn_scalar",
            local=True,
            period=6,
            period_key="sliding_window_pattern",
            thetas=(1_000_000.0, 10_000.0),
        ),
        style=GEMMA_STYLE,
        # vLLM reads no bound on products of this family, so there must be none.
        fixed={"attn_logit_softcapping": None},
        defaults=GEMMA_DEFAULTS | {"final_logit_softcapping": None},
    ),
    # GLM-4.5 and 4.6: half of every head turns, and experts are chosen by sigmoid scores and a bias as in DeepSeek-V3.
    Family(
        "Glm4MoeForCausalLM",
        "Glm4MoeForSequenceClassification",  # which transformers lacks: only critics here start from one
        qkv_bias_key="attention_bias",
        qk_norm_key="use_qk_norm",
        attention=AttentionKeys(partial_rotary=0.5),
        experts=Experts(
            count_keys=("n_routed_experts", "num_local_experts"),
            dense_keys=first_rule(absent=1),
            shared=DEEPSEEK_SHARED,
            scoring=Scoring("sigmoid", best=2, bias=DEEPSEEK_BIAS, normalised=True),
        ),
        defaults={
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": True,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "eos_token_id": None,
        },
        ahead_key="num_nextn_predict_layers",
    ),
    # Llama 2, 3, 3.1, 3.2, 3.3 and what shares their architecture.
    Family("LlamaForCausalLM", "LlamaForSequenceClassification"),
    # Mistral 7B: Llama's tensors, with a sliding window in the first version.
    Family("MistralForCausalLM", "MistralForSequenceClassification", window=Window(default=4096)),
    # Mistral's attention, experts under names of their own, and a softmax over the chosen experts alone.
    Family(
        "MixtralForCausalLM",
        "MixtralForSequenceClassification",
        experts=Experts(
            block="block_sparse_moe",
            gate="w1",
            up="w3",
            down="w2",
            count_keys=("num_local_experts",),
            size_key="intermediate_size",
            norm_topk_prob=True,
        ),
        window=Window(),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    ),
    # Qwen2 and Qwen2.5.
    Family("Qwen2ForCausalLM", "Qwen2ForSequenceClassification", qkv_bias=True, window=QWEN_WINDOW, defaults=NO_END),
    # Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, and a gated MLP for every token beside the experts.
    Family(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeForSequenceClassification",
        qkv_bias=True,
        experts=Experts(
            dense_keys=STEP_RULE,
            shared=SharedExperts(
                "shared_expert", size_key="shared_expert_intermediate_size", gate="shared_expert_gate"
            ),
        ),
        window=QWEN_WINDOW,
        defaults=NO_END,
        fixed={"qkv_bias": True},
    ),
    # Qwen3, dense.
    Family("Qwen3ForCausalLM", "Qwen3ForSequenceClassification", qk_norm=True, window=QWEN_WINDOW, defaults=NO_END),
    # Qwen3 with experts, in all layers or in those that config.json names.
    Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeForSequenceClassification",
        qk_norm=True,
        experts=Experts(dense_keys=STEP_RULE),
        window=QWEN_WINDOW,
        defaults=NO_END,
    ),
)

FAMILIES: dict[str, Family] = {family.architecture: family for family in ALL}
"""Language models: what an actor, a reference or a critic can start from."""
REWARD_FAMILIES: dict[str, Family] = {family.reward_architecture: family for family in ALL}
"""Models with a classification head, which only a critic can start from."""


def family_of(architectures: Iterable[str] | None) -> Family:
    """The family of a HF config's `architectures`; raises ConfigError, listing the known ones, when there is none."""
    known = FAMILIES | REWARD_FAMILIES
    for name in architectures or []:
        if name in known:
            return known[name]
    raise ConfigError(f"architecture {architectures} is not supported; known: {', '.join(sorted(known))}")


def is_reward_model(architectures: Iterable[str] | None) -> bool:
    """Whether a HF config's `architectures` name a model with a classification head."""
    return any(name in REWARD_FAMILIES for name in architectures or [])
