"""Dense models: TP, PP, DP, and several chunks in a stage or stages of uneven size.

Whatever stage or chunk has a layer, layers are applied in the order of the model, and a micro-batch's gradient is added
to those of others; the schedule only says when. A filler micro-batch, which an interleaved schedule needs, and a filler
row weigh nothing in any sum. 11 rows in micro-batches of 4 are 3, which the interleaved schedule fills up to 4.
In those of 16 they are 1, filled up to 2; in those of 2 they are 6, of which the last has a filler row.

Not exercised: overlap of messages with work; more than two chunks.
"""

from __future__ import annotations

from layout_keys import PADDED, SP, VPP2
from observations import BITWISE, LOG_PROBS, MOVES, UPDATE, Update
from scenarios import ALONE, ALWAYS, LONG, Row, Scenario
from tiny_models import save_llama, save_llama31, save_mistral, save_qwen2, save_qwen3, save_qwen3_moe

from megatron_rl.config.megatron import COUNTED_PARTS

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
COUNTED = dict.fromkeys(COUNTED_PARTS, True)
PP2, SMALL, SIX_LAYERS = (2, 1, 2), {"micro_batch": 2}, {"num_hidden_layers": 6}
UPDATES = (
    # Every axis, TP with each of the others; of DP `make test` has an update of experts, and one by cross-entropy.
    Row(Scenario(save_qwen2, "TP2xPP2", (4, 2, 2)), UPDATE, ALWAYS),
    Row(Scenario(save_qwen2, "TP2xDP2", (4, 2, 1)), UPDATE),
    Row(Scenario(save_qwen2, "one process"), MOVES, ALWAYS),
    # Query and key norms, and the value head.
    Row(Scenario(save_qwen3, "TP2, PP2, VPP2, SP", (4, 2, 2), SP | VPP2), UPDATE, ALWAYS),
    Row(Scenario(save_qwen3, "one process"), LOG_PROBS, ALWAYS),
    # Each rank has its stage's layers. Would not catch filler micro-batches that only cost time.
    Row(Scenario(save_qwen2, "stages of 2, 1, 1", (3, 1, 3), {FIRST: 2, LAST: 1}), Update(layers=4), ALWAYS),
    Row(Scenario(save_qwen2, "stages of 1, 3", (2, 1, 2), {FIRST: 1}), Update(layers=4)),
    Row(Scenario(save_qwen2, "stages of 1, 2, 1, embedding and loss counted", (3, 1, 3), COUNTED), Update(layers=4)),
    Row(Scenario(save_qwen2, "PP2, VPP2, one micro-batch", PP2, VPP2 | {"micro_batch": 16}), Update(layers=4)),
    # With a head of its own, in six micro-batches: chunks of 1, or of 1, 2, 2 and 1 layers.
    Row(Scenario(save_llama, "PP2, VPP2", PP2, VPP2 | SMALL), UPDATE, ALWAYS),
    Row(Scenario(save_llama, "PP2, VPP2, counted", PP2, VPP2 | SMALL | COUNTED, changes=SIX_LAYERS), UPDATE),
)
ROLLOUT = "actor_rollout_ref__rollout__"
EXACT, TP2 = {f"{ROLLOUT}bitwise": True}, {f"{ROLLOUT}tensor_model_parallel_size": 2}
EP = "actor_rollout_ref__actor__megatron__expert_model_parallel_size"
# Engine and trainer with the same arithmetic, whatever is computed together.
EQUAL_BITS = tuple(
    Row(Scenario(save, layout, ranks, keys=EXACT | keys), BITWISE, when)
    for save, layout, ranks, keys, when in (
        (save_qwen2, "TP2xPP2", (4, 2, 2), TP2, ALWAYS),
        (save_qwen3, "one process, padded", ALONE, PADDED, ALWAYS),
        (save_llama31, "PP2xDP2", (4, 1, 2), {}, LONG),
        (save_qwen3_moe, "EP2, PP2", (4, 1, 2), {EP: 2}, LONG),
        (save_llama, "PP2, adapters", (2, 1, 2), {"actor_rollout_ref__model__lora__rank": 8}, LONG),
        (save_mistral, "TP2, draft tokens", (2, 2, 1), TP2 | {f"{ROLLOUT}speculative": "ngram"}, LONG),
    )
)
DENSE = (*UPDATES, *EQUAL_BITS)
