"""Replay of experts: Qwen3-MoE in every layout, and families of which not every layer has experts."""

from __future__ import annotations

import itertools

from layout_keys import CP2, EP2, ETP1, PADDED, SP, VPP2
from replay_observations import EnginesExperts, ReplayedBits, ReplayedUpdate
from routed_experts import BOUND, tied
from scenarios import ALONE, ALWAYS, LONG, Row, Scenario
from sweeps import WEEKLY
from tiny_gpt_oss import save_gpt_oss
from tiny_minimax import save_minimax
from tiny_models import save_qwen2_moe, save_qwen3_moe, save_qwen3_moe_with_dense_layers
from tiny_qwen3_5 import save_qwen3_5_moe

TWO_STAGES = (2, 1, 2)
ROLLOUT_TP2 = {"actor_rollout_ref__rollout__tensor_model_parallel_size": 2}
WHOLE_EXPERTS = {"actor_rollout_ref__rollout__expert_parallel_size": 2}
LARGE_WEIGHTS = {"initializer_range": 0.3}
OF_ENGINE = (
    *(
        Row(Scenario(tied(save_qwen3_moe), layout, *cut, changes=LARGE_WEIGHTS), EnginesExperts(), when)
        for layout, cut, when in (
            ("one process", (), ALWAYS),
            ("PP2, VPP2 to TP1", (TWO_STAGES, VPP2), LONG),
            ("DP2, EP2 to TP2", ((2, 1, 1), EP2, ROLLOUT_TP2), LONG),
            ("PP2 to TP2, EP2", (TWO_STAGES, {}, ROLLOUT_TP2 | WHOLE_EXPERTS), WEEKLY),
        )
    ),
    # Experts in the last layer alone; a dense layer on each stage; routers with biases; scores of sigmoids, whose
    # layers lie as gpt-oss's do; linear layers on each stage.
    *(
        Row(Scenario(tied(save), "PP2", TWO_STAGES), EnginesExperts(without=2 * BOUND, least=0.001), when)
        for save, when in (
            (save_qwen3_moe_with_dense_layers, ALWAYS),
            (save_qwen2_moe, WEEKLY),
            (save_gpt_oss, LONG),
            (save_minimax, WEEKLY),
            (save_qwen3_5_moe, LONG),
        )
    ),
)
# Each pass is over one rank or two, of sequences of 8 to 19 tokens.
UNEVEN = {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 1}
UP_TO_CP2 = UNEVEN | CP2 | {"dynamic_context_parallel": True}
FEW_TOKENS = {
    "actor_rollout_ref__actor__use_dynamic_bsz": True,
    "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 12,
}
LAYOUTS = {
    "DP2, EP2": ((2, 1, 1), EP2),
    "TP2, PP2, EP2": ((4, 2, 2), SP | EP2 | ETP1),
    "TP2, PP2, VPP2": ((4, 2, 2), SP | ETP1 | VPP2),
    "TP2, CP2, SP": ((4, 2, 1), SP | ETP1 | CP2),
    "PP2, up to CP2": ((4, 1, 2), UP_TO_CP2, FEW_TOKENS),
}
WHEN = {
    ("TP2, PP2, VPP2", "R2"): ALWAYS,
    **{(layout, "R2"): WEEKLY for layout in ("TP2, PP2, EP2", "TP2, CP2, SP", "PP2, up to CP2")},
}
"""R2 records experts on TP2 with stages, and on EP2; R3 brings others' to ranks of CP, too."""
UPDATES = tuple(
    Row(Scenario(save_qwen3_moe, layout, *cut), ReplayedUpdate(mode), WHEN.get((layout, mode), LONG))
    for (layout, cut), mode in itertools.product(LAYOUTS.items(), ("R2", "R3"))
)
BY_ROWS = Row(Scenario(save_qwen3_moe, "padded", keys=PADDED), ReplayedUpdate("R3"), ALWAYS)
"""A block of rows under each other, beside one in which rows share a prompt."""
FULL, BLOCK, SELECTIVE = ("full", "uniform", 1), ("full", "block", 1), ("selective", None, None, ("moe",))
OF_TWO_ROWS = {"actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 2}
BITS = (
    Row(
        Scenario(save_qwen3_moe, "one process"),
        ReplayedBits(((), FULL, SELECTIVE), of_routers=True),
        ALWAYS,
    ),
    *(
        Row(Scenario(save_qwen3_moe, layout, ranks, sizes, OF_TWO_ROWS), ReplayedBits(overrides), when)
        for layout, ranks, sizes, overrides, when in (
            ("one process", ALONE, {}, (FULL, BLOCK, SELECTIVE), LONG),
            ("PP2, VPP2", TWO_STAGES, VPP2, (FULL, SELECTIVE), ALWAYS),
            ("TP2, EP2", (2, 2, 1), SP | EP2 | ETP1, (FULL, SELECTIVE), LONG),
        )
    ),
)
REPLAYED = (*OF_ENGINE, *UPDATES, BY_ROWS, *BITS)
