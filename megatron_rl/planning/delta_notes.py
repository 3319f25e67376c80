"""A sentence of the plan about `rollout.weight_deltas`."""

from __future__ import annotations

from megatron_rl.planning.delta_memory import sends_deltas, sent_last
from megatron_rl.planning.plan_tables import amount
from megatron_rl.planning.run_models import RunModels


def delta_notes(models: RunModels) -> list[str]:
    """A sentence about what is kept to send only what changed; none where everything is sent."""
    if not sends_deltas(models):
        return []
    kept = max(sum(sent_last(models, pp_rank).values()) for pp_rank in range(models.grid.pp_size))
    note = (
        f"rollout.weight_deltas: training ranks keep what they sent last, {amount(kept)} at most on each; the "
        "resharding above is that of all weights, as in the first transfer and after a change of replicas"
    )
    if models.element > 2:
        note += f"; nearly all weights of {models.megatron.dtype} change in a step, those of bfloat16 do not"
    return [note]
