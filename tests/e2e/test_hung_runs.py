"""A rank of a real run is stopped while it generates or exchanges weights, or updates and a signal comes meanwhile."""

from __future__ import annotations

import signal
import time
from contextlib import suppress

import psutil
import pytest
from command_line import LIMIT, is_in
from short_runs import WITHOUT_RAY

from megatron_rl.cluster.heartbeat import STACKS_FILE

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive, pytest.mark.timeout(400)]

MISSED_S = 600
"""After so long a stopped rank would be missed."""
STALL_S = 60
"""Longer than imports take on a busy machine."""
TWO = (
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "trainer.val_before_train=false",
    "trainer.total_training_steps=50",
    f"trainer.stall_timeout_s={STALL_S}",
)
"""PP2 -> TP1: generation alone waits for nobody, so the other rank goes on there."""


def stop_rank_in(run, method: str) -> psutil.Process:
    """Wait until a rank is in a method, as its title says, and stop it there."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        assert run.process.poll() is None, run.text()
        with suppress(psutil.Error):  # a process that has just ended
            ranks = run.workers()
            until = time.monotonic() + 10
            while ranks and time.monotonic() < until:
                process = ranks[0]
                if is_in(process, method):
                    process.suspend()
                    if is_in(process, method):
                        return process
                    process.resume()
                time.sleep(0.001)
    raise AssertionError(f"no rank was seen in {method}: {run.text()}")


def test_a_stopped_rank_is_named(command_line) -> None:
    """Through Ray, while it generates. Would not catch a rank that is stopped for less than the limit and then goes
    on.
    """
    run = command_line(*TWO, "trainer.launcher=ray", "trainer.heartbeat_timeout_s=15")
    stopped = stop_rank_in(run, "rollout.advance")
    rank = stopped.name().split()[1]
    assert run.wait() == 3, run.text()
    text = " ".join(run.text().split())
    assert f"rank {rank} (" in text and f"in advance: process {stopped.pid} on node " in text, text
    assert "no sign of life" in text and "was stopped by a signal" in text, text
    assert "thread MainThread" in (run.run / STACKS_FILE).read_text()
    assert run.left_over() == []


def test_a_signal_ends_a_run_with_a_stopped_rank(command_line) -> None:
    """The grace of a run that saves is over before the rank is missed. Would not catch a driver that is stopped."""
    keys = ("trainer.save_freq=1000", "trainer.stop_grace_s=5")
    missed = (f"trainer.{name}_timeout_s={MISSED_S}" for name in ("heartbeat", "stall"))
    run = command_line(*TWO, WITHOUT_RAY, *missed, *keys)
    stop_rank_in(run, "actor.update")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(MISSED_S / 2) == 22, run.text()
    assert run.left_over() == []
