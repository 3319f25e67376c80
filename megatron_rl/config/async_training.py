"""Keys of `async_training`: how generation runs ahead of training. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl.config.constraints import OURS, Count, OneOf, Size

KV_CACHE_CHOICES = ("keep", "recompute")
STRAGGLER_POLICIES = ("wait", "truncate", "resample")


@dataclass
class AsyncTrainingConfig:
    """Generation in slices of engine steps, between which weights may change. The names that verl has are verl's.

    How far it runs ahead is `trainer.rollout_ahead`.
    """

    trigger_parameter_sync_step: Size = 1
    """Training steps from one transfer of weights to the rollout to the next."""
    partial_rollout: bool = False
    """Go on with unfinished answers under new weights; false: every answer is drawn from one version of the weights."""
    kv_cache: Annotated[str, OneOf(KV_CACHE_CHOICES), OURS] = "keep"
    """Keys and values of an unfinished answer when weights change: keep | recompute, under the new weights."""
    slice_steps: Annotated[Size, OURS] = 16
    """Engine steps of a replica between two looks at what is new: weights, finished and waiting requests."""
    deterministic: Annotated[bool, OURS] = False
    """Compute who generates what with which weights from the configuration and the answers' lengths alone; false: as
    replicas and weights become ready, recorded in schedule.jsonl for `train --replay`. With turns, also without
    rollout_ahead, true lets every turn wait for the answers to all."""
    second_buffer: Annotated[bool, OURS] = True
    """Receive new weights into a second buffer while slices go on; false: between two slices. On GPUs only false, which
    is the default there."""
    straggler_policy: Annotated[str, OneOf(STRAGGLER_POLICIES), OURS] = "wait"
    """Handling of the last answers of a batch once they keep the trainer waiting for more than straggler_slices:
    wait | truncate: take the tokens that are there | resample: draw the answer again with another seed."""
    straggler_slices: Annotated[Size, OURS] = 64
    """Slices that the trainer waits for an answer when all others of its batch are finished."""
    straggler_attempts: Annotated[Count, OURS] = 1
    """Times that resample draws an answer again, before it is truncated."""
    max_replica_restarts: Annotated[Count, OURS] = 3
    """Restarts of each rollout replica; one that fails again stays away, and the pool goes on without it."""
