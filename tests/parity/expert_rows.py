"""Qwen3-MoE and losses of routers.

On top of what `updates.py` says: a router chooses by its token alone, and an expert's answer depends on its token
alone. So it does not matter on which rank an expert lies, nor next to which tokens: EP sends a token to its experts'
ranks and adds up, with the router's weights, what comes back. ETP cuts an expert's two matrices as TP cuts a dense
layer's. SP gives each TP rank a part of the tokens between the matrices, where only norms are taken, a token at a time.
The gradient of an expert is a sum over the tokens of all ranks that send it some, divided as all others.

The auxiliary loss is a mean over rows of a product of two means over the row's tokens, so a row's term needs that row
alone; under CP or SP its tokens' counts are summed over the ranks that share the row. The z-loss is a mean over tokens.
Both are divided by numbers of the whole mini-batch, and a layer's loss is computed by the stage that has it. What they
are is in `test_balanced_routers.py`.

Not exercised: capacities, with which neighbours decide whether a token is dropped (none are dropped here); ties between
experts (`replay_rows.py`); balance over a whole batch instead of a row; grouped kernels of CUDA.
"""

from __future__ import annotations

from layout_keys import CP2, EP2, ETP1, FULL, LOSSES, PADDED, SP, VPP2, of_actor, of_critic
from observations import GRADIENTS, LOG_PROBS, MOVES, UPDATE, Update
from scenarios import ALONE, ALWAYS, LONG, Row, Scenario
from sweeps import WEEKLY
from tiny_models import save_deepseek_v3, save_glm4_moe, save_qwen3_moe

MOE = save_qwen3_moe
"""6 experts, whose [gate; up] have 2 x 48 rows of 128."""
BALANCED = of_actor(LOSSES)
CRITICS = of_critic(LOSSES)
ONLY_CRITICS = Update(reported=("critic/moe_aux_loss/mean",), unreported=("actor/moe_aux_loss/mean",))


def balanced(layout: str, ranks=ALONE, sizes=None, keys=None, when=LONG) -> Row:
    """A row of Qwen3-MoE with losses of the actor's routers."""
    name = f"balanced, {layout}"
    return Row(Scenario(MOE, name, ranks, sizes or {}, keys or {}, common=BALANCED), UPDATE, when)


EXPERTS = (
    Row(Scenario(MOE, "PP2, VPP2, DP2, EP2", (4, 1, 2), EP2 | VPP2), Update(shard=(3, 96, 128)), ALWAYS),
    Row(Scenario(MOE, "TP2, ETP1", (2, 2, 1), SP | ETP1), Update(shard=(6, 96, 128))),
    Row(Scenario(MOE, "TP2, EP2, ETP1", (2, 2, 1), SP | EP2 | ETP1), Update(shard=(3, 96, 128))),
    # Data-parallel ranks have 6 and 5 rows in micro-batches of 5: two passes and one, and experts on both.
    Row(
        Scenario(MOE, "TP2, DP2, EP2, ETP2", (4, 2, 1), SP | EP2 | {"micro_batch": 5}),
        Update(shard=(3, 48, 128)),
        ALWAYS,
    ),
    Row(Scenario(MOE, "one process"), MOVES, ALWAYS),
    Row(Scenario(MOE, "one process"), LOG_PROBS, ALWAYS),
    # Both ways to weigh the chosen experts.
    Row(Scenario(MOE, "one process", changes={"norm_topk_prob": True}), GRADIENTS, ALWAYS),
    Row(Scenario(MOE, "one process", changes={"norm_topk_prob": False}), GRADIENTS, ALWAYS),
    # Both losses of every layer.
    balanced("TP2, DP2, EP2, ETP1", (4, 2, 1), SP | EP2 | ETP1, when=ALWAYS),
    balanced("PP2, VPP2, DP2, EP2", (4, 1, 2), EP2 | VPP2),
    balanced("CP2, EP2", (2, 1, 1), EP2 | CP2),
    balanced("TP2, CP2", (4, 2, 1), SP | CP2),
    balanced("PP2, recomputed", (2, 1, 2), FULL),
    # However a mini-batch is cut. Would not catch a loss that is too small by the same factor in all, nor filler that
    # is a token of its own in both.
    balanced("micro-batches of 2", sizes={"micro_batch": 2}, when=ALWAYS),
    balanced("one micro-batch", sizes={"micro_batch": 11}),
    balanced("padded", keys=PADDED),
    Row(Scenario(MOE, "critic balanced, TP2, DP2, EP2", (4, 2, 1), SP | EP2 | ETP1, common=CRITICS), ONLY_CRITICS),
    # Scores of sigmoids do not add up to 1 by themselves; GLM-4.5's experts are in no groups.
    *(
        Row(Scenario(save, "balanced, TP2, PP2, EP2, ETP1", (4, 2, 2), SP | EP2 | ETP1, common=BALANCED), UPDATE, when)
        for save, when in ((save_deepseek_v3, LONG), (save_glm4_moe, WEEKLY))
    ),
)
