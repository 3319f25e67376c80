"""Gemma-2: windows in every second layer, bounded products and logits, norms around every part of a layer."""

from megatron_rl.model.families.attention_parts import AttentionKeys
from megatron_rl.model.families.family import GEMMA, Family

FAMILY = Family(
    "Gemma2ForCausalLM",
    "Gemma2ForSequenceClassification",
    attention=AttentionKeys(scale="query_pre_attn_scalar", soft_cap="attn_logit_softcapping", local=True),
    style=GEMMA,
    defaults={
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
)
