"""What `rollout.weight_deltas` costs in memory at both ends of a weight transfer."""

from __future__ import annotations

from megatron_rl.hybrid_engine.delta_sizes import SENT_LAST, mask_bytes
from megatron_rl.hybrid_engine.transfer_plan import MIN_CHUNK, PARTS_PER_CHUNK
from megatron_rl.planning.role_ledger import Held
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.transition import sent_bytes

INDICES = "indices of changes"
MOST_CHUNK = MIN_CHUNK + MIN_CHUNK // PARTS_PER_CHUNK
"""Elements by which a rank may send more than its even share."""


def sends_deltas(models: RunModels) -> bool:
    """Return whether only what changed goes to a pool that generates."""
    placement = models.placement
    is_asked = models.config.actor_rollout_ref.rollout.weight_deltas
    return is_asked and placement.generates and not placement.is_colocated


def sent_last(models: RunModels, pp_rank: int) -> Held:
    """Return the copy of what a training rank of a stage sent last, at most; {}: it keeps none."""
    if not sends_deltas(models):
        return {}
    weights = models.actor_adapters or models.actor_weights
    share = sent_bytes(models, weights)[pp_rank * models.grid.stage_size] + MOST_CHUNK * models.element
    return {SENT_LAST: min(share, weights.numel(pp_rank) * models.element)}


def indices(models: RunModels, num_bytes: int, scratch: int) -> Held:
    """Return what a rank needs to find or pass on changes of that many bytes of weights, at most: a bit for each
    element, and next to a message its mask and its values. scratch: bytes of all messages.
    """
    return {INDICES: mask_bytes(num_bytes // models.element) + scratch} if sends_deltas(models) else {}
