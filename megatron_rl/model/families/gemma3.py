"""Gemma-3, the language models: five layers with windows and a rotary embedding of their own to one without."""

from megatron_rl.model.families.attention_parts import AttentionKeys
from megatron_rl.model.families.family import GEMMA, Family

FAMILY = Family(
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
    style=GEMMA,
    # vLLM reads no bound on products of this family, so there must be none.
    fixed={"attn_logit_softcapping": None},
    defaults={
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "final_logit_softcapping": None,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
)
