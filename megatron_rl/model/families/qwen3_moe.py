"""Qwen3 with experts in every layer."""

from megatron_rl.model.families.family import Experts, Family, Window

FAMILY = Family(
    "Qwen3MoeForCausalLM",
    "Qwen3MoeForSequenceClassification",
    qk_norm=True,
    experts=Experts(),
    window=Window(switch="use_sliding_window", default=4096),
    fixed={"decoder_sparse_step": 1, "mlp_only_layers": []},
)
