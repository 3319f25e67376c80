"""Keys of `async_training`: asynchronous generation. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl.config.constraints import OURS, Count, OneOf, Size

KV_CACHE_CHOICES = ("keep", "recompute")
STRAGGLER_POLICIES = ("wait", "truncate", "resample")


@dataclass
class AsyncTrainingConfig:
    """Generation in slices of engine steps, between which weights may change.

    `trainer.rollout_ahead` bounds the staleness.
    """

    trigger_parameter_sync_step: Size = 1
    """Training steps from one weight transfer to the rollout to the next."""
    partial_rollout: bool = False
    """Partial rollout: continue unfinished responses under new weights; false: every response is sampled from one
    version of the weights."""
    kv_cache: Annotated[str, OneOf(KV_CACHE_CHOICES), OURS] = "keep"
    """KV cache of an unfinished response when weights change: keep | recompute it with the new weights."""
    slice_steps: Annotated[Size, OURS] = 16
    """Engine steps of a slice. Between two slices a replica takes new weights and requests and returns finished
    ones."""
    deterministic: Annotated[bool, OURS] = False
    """true: the schedule (which replica generates what with which weights) depends only on the configuration and on
    response lengths; in multi-turn runs each turn then waits for all episodes | false: it depends on time, and is
    recorded in schedule.jsonl for `train --replay`."""
    second_buffer: Annotated[bool, OURS] = True
    """Receive new weights into a second buffer while slices continue; false: receive them between two slices. On GPUs
    only false is supported, and is the default."""
    straggler_policy: Annotated[str, OneOf(STRAGGLER_POLICIES), OURS] = "wait"
    """Stragglers, the last responses of a batch that keep the trainer waiting for more than straggler_slices: wait for
    them | truncate: use the tokens that they have | resample: start the response again with another seed."""
    straggler_slices: Annotated[Size, OURS] = 64
    """Slices that the trainer waits for a straggler: a response, when all others of its batch are finished."""
    straggler_attempts: Annotated[Count, OURS] = 1
    """straggler_policy=resample: number of times that a response is started again, before it is truncated."""
    max_replica_restarts: Annotated[Count, OURS] = 3
    """Restarts of each rollout replica; one that fails again is not restarted, and the pool continues without it."""
