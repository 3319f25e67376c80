"""MiMo, by Xiaomi."""

from __future__ import annotations

from megatron_rl.model.families.family import Carried, Family, MTPForm
from megatron_rl.model.families.known.qwen import NO_END, WINDOW

FAMILIES = (
    # MiMo-7B: Qwen2, and a multi-token prediction layer. A classifier on its trunk is Qwen2's.
    Family(
        "MiMoForCausalLM",
        "Qwen2ForSequenceClassification",
        qkv_bias=True,
        window=WINDOW,
        fixed={"attention_bias": True},
        defaults=NO_END,
        carried=Carried(
            prefixes=("model.mtp_layers.",),
            ahead_key="num_nextn_predict_layers",
            mtp=MTPForm(
                "MiMoMTPModel",
                place="model.mtp_layers.0.",
                engine_place="model.mtp_layers.{layer}.",
                names=("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
                head="lm_head.weight",
                reads_unnormed=True,
            ),
        ),
        own_type="qwen2",
        other_types=("mimo",),
    ),
)
