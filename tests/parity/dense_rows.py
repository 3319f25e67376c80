"""Dense models: TP, PP, DP, and several chunks in a stage or stages of uneven size.

Whatever stage or chunk has a layer, layers are applied in the order of the model, and a micro-batch's gradient is added
to those of others; the schedule only says when. A filler micro-batch, which an interleaved schedule needs, and a filler
row weigh nothing in any sum. 11 rows in micro-batches of 4 are 3, which the interleaved schedule fills up to 4.
"""

from __future__ import annotations

from layout_keys import SP, VPP2
from observations import LOG_PROBS, MOVES, UPDATE
from scenarios import ALWAYS, Row, Scenario
from tiny_models import save_qwen2, save_qwen3

DENSE = (
    # Every axis, TP with each of the others; of DP `make test` has an update of experts, and one by cross-entropy.
    Row(Scenario(save_qwen2, "TP2xPP2", (4, 2, 2)), UPDATE, ALWAYS),
    Row(Scenario(save_qwen2, "TP2xDP2", (4, 2, 1)), UPDATE),
    Row(Scenario(save_qwen2, "one process"), MOVES, ALWAYS),
    # Query and key norms, and the value head.
    Row(Scenario(save_qwen3, "TP2, PP2, VPP2, SP", (4, 2, 2), SP | VPP2), UPDATE, ALWAYS),
    Row(Scenario(save_qwen3, "one process"), LOG_PROBS, ALWAYS),
)
