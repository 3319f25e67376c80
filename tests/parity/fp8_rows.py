"""FP8 training, emulated: rounded products of every kind of linear, cut along every axis.

A scale belongs to 128 elements of a token or to 128 x 128 of a weight, so layers and experts have the same scales on
other ranks, and passes of other tokens, too. A shard of TP may have a smaller scale; as scales are powers of two, that
moves none but the smallest numbers of a block. A product that is made again reads the weight that was rounded first.

Not exercised: `tensorwise`, whose scales are those of a rank's shard; products of a GPU.
"""

from __future__ import annotations

from layout_keys import EP2, FULL, SP, of_actor
from observations import UPDATE
from scenarios import ALWAYS, Row, Scenario
from tiny_gemma4 import save_gemma4
from tiny_gpt_oss import save_gpt_oss
from tiny_models import save_deepseek_v3, save_qwen2
from tiny_qwen3_5 import save_qwen3_5_moe

FP8 = of_actor(
    {
        "fp8_emulate": True,
        "override_transformer_config__fp8": "hybrid",
        "override_transformer_config__fp8_recipe": "blockwise",
    }
)
FUSED = of_actor({"override_transformer_config__gradient_accumulation_fusion": True})
PP2 = (2, 1, 2)

FP8_TRAINING = (
    Row(Scenario(save_deepseek_v3, "fp8, PP2, recomputed", PP2, FULL, common=FP8), UPDATE, ALWAYS),
    Row(Scenario(save_deepseek_v3, "fp8, EP2", (2, 1, 1), EP2, common=FP8), UPDATE),
    Row(Scenario(save_qwen3_5_moe, "fp8, PP2, recomputed", PP2, FULL, common=FP8), UPDATE),
    Row(Scenario(save_gemma4, "fp8, PP2", PP2, common=FP8), UPDATE),
    Row(Scenario(save_gpt_oss, "fp8, EP2", (2, 1, 1), EP2, common=FP8), UPDATE),
    Row(Scenario(save_qwen2, "fp8, TP2", (2, 2, 1), SP, common=FP8), UPDATE),
    Row(Scenario(save_qwen2, "fp8, fused gradients", keys=FUSED, common=FP8), UPDATE),
)
