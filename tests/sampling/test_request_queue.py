"""Orders become slices, and reports become facts."""

from __future__ import annotations

import pytest

from megatron_rl.rollout.slices import SliceReport
from megatron_rl.sampling.in_flight import InFlightBatches
from megatron_rl.sampling.request_queue import RequestQueue
from megatron_rl.sampling.schedule_types import ScheduleConfig
from megatron_rl.sampling.scheduler import Scheduler


def test_a_slice_that_was_not_begun_is_not_taken_for_one_that_was() -> None:
    """Its requests would never be drawn. Would not catch weights that are wrong."""
    queue = RequestQueue(
        Scheduler(ScheduleConfig(batch_rows=1, num_steps_total=1), 1), InFlightBatches(1, lambda *_: 0), 1
    )
    with pytest.raises(RuntimeError, match="replica 0 did not receive announced weights: the sender left"):
        queue.done(SliceReport(0, 0, 0, broken="the sender left"))
