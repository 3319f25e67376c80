"""Every family in every kind of layout, in and out; exports of trained models."""

from __future__ import annotations

from folder_observations import Exported, InAndOut
from layout_keys import EP2, ETP1, SP, VPP2
from scenarios import ALONE, ALWAYS, LONG, Row, SaveModel, Scenario
from sweeps import WEEKLY
from tiny_gemma4 import save_gemma4, save_gemma4_with_keys_for_values
from tiny_glm import save_glm4_moe_lite
from tiny_gpt_oss import save_gpt_oss
from tiny_minimax import save_minimax
from tiny_models import (
    save_deepseek_v2,
    save_deepseek_v3,
    save_gemma2,
    save_gemma3,
    save_glm4_moe,
    save_llama,
    save_llama31,
    save_mistral,
    save_mixtral,
    save_moonlight,
    save_qwen2,
    save_qwen2_moe,
    save_qwen2_with_windows,
    save_qwen3,
    save_qwen3_moe,
    save_qwen3_moe_with_dense_layers,
)
from tiny_moonshot import save_kimi_k2
from tiny_qwen3_5 import save_qwen3_5, save_qwen3_5_moe, save_qwen3_next

GEMMA4 = (save_gemma4, save_gemma4_with_keys_for_values)
DENSE = (
    *(save_llama, save_llama31, save_qwen2, save_qwen3, save_mistral, save_gemma2, save_gemma3),
    *GEMMA4,
    save_qwen3_5,
)
LATENT = (save_deepseek_v2, save_deepseek_v3, save_moonlight, save_kimi_k2, save_glm4_moe_lite)
WITH_EXPERTS = (
    *(save_qwen3_moe, save_mixtral, save_qwen2_moe, save_qwen3_moe_with_dense_layers, save_glm4_moe),
    *LATENT,
    *(save_gpt_oss, save_minimax, save_qwen3_5_moe, save_qwen3_next),
)
LAYOUTS = {
    "one process": (ALONE, {}),
    "TP2": ((2, 2, 1), {}),
    "PP2": ((2, 1, 2), {}),
    "TP2xPP2": ((4, 2, 2), {}),
    "EP2": ((2, 1, 1), EP2),
}
"""Name -> (ranks, tp, pp), further sizes."""
OFTEN = (
    (save_llama, "TP2xPP2"),
    (save_mixtral, "TP2"),
    (save_qwen2_moe, "EP2"),
    (save_deepseek_v2, "PP2"),
    (save_gemma3, "PP2"),
    (save_gpt_oss, "TP2"),
    (save_gemma4_with_keys_for_values, "PP2"),
)
"""What `make test` goes through: what families are built of (biases, shared experts, latent attention, windows,
sinks), and every layout, dense and with experts. Qwen2, Qwen3 and Qwen3-MoE are in `test_hybrid_engine.py` and in other
rows; the tensors of every family in tests/model.
"""
OF_EACH_PART = (
    *(save_llama31, save_qwen3_moe_with_dense_layers, save_gemma2, save_deepseek_v3, save_glm4_moe, save_gpt_oss),
    *(save_minimax, save_gemma4_with_keys_for_values, save_qwen3_5_moe),
)
SPREAD = (save_gpt_oss, save_minimax, save_qwen3_5_moe)
SWEPT = [(save, "TP2xPP2") for save in OF_EACH_PART] + [(save, "EP2") for save in SPREAD]
"""What the sweeps have: each part in one family, cut along all axes, and each layout of experts' weights spread."""
NEWER = (
    *(save_gpt_oss, save_minimax, *GEMMA4, save_kimi_k2, save_glm4_moe_lite),
    *(save_qwen3_5, save_qwen3_5_moe, save_qwen3_next),
)
FURTHER = [(save, layout) for save in NEWER for layout in LAYOUTS if save in WITH_EXPERTS or layout != "EP2"]
FURTHER += [(save, "TP2xPP2") for save in (*DENSE, *WITH_EXPERTS)] + [(save, "EP2") for save in WITH_EXPERTS]
FURTHER += [(save_llama31, "one process"), (save_qwen2_with_windows, "PP2")]
"""What runs once a week, but for the cases above: every family cut along all of its axes and its experts spread, the
newer ones in all layouts. Other families of the sweeps have their parts.
"""


def in_and_out(save: SaveModel, layout: str) -> Row:
    """A row of an untouched model; TP of experts takes sequence parallelism."""
    ranks, sizes = LAYOUTS[layout]
    if save in WITH_EXPERTS and ranks[1] > 1:
        sizes = sizes | SP
    when = ALWAYS if (save, layout) in OFTEN else LONG if (save, layout) in SWEPT else WEEKLY
    return Row(Scenario(save, layout, ranks, sizes), InAndOut(), when)


EXPORTED = tuple(
    Row(Scenario(save, layout, ranks, sizes), Exported(), when)
    for save, layout, ranks, sizes, when in (
        (save_qwen2, "PP2, VPP2", (2, 1, 2), VPP2, ALWAYS),
        (save_llama, "stages of 1, 3", (2, 1, 2), {"num_layers_in_first_pipeline_stage": 1}, LONG),
        (save_qwen3_moe, "TP2, PP2, EP2, ETP1", (4, 2, 2), SP | EP2 | ETP1, ALWAYS),
        (save_gpt_oss, "TP2, PP2", (4, 2, 2), SP, LONG),
        (save_minimax, "TP2, PP2, EP2, ETP1", (4, 2, 2), SP | EP2 | ETP1, WEEKLY),
    )
)
FOLDERS = (*(in_and_out(*case) for case in dict.fromkeys([*OFTEN, *SWEPT, *FURTHER])), *EXPORTED)
