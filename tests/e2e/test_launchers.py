"""Ranks of one machine without Ray: the same ends as through Ray. The same bits: `test_resumed_runs.py`."""

from __future__ import annotations

import os
import signal

import pytest
from short_runs import SHORT, TP2, WITHOUT_RAY, metrics, reached, steps_saved

pytestmark = [pytest.mark.dist, pytest.mark.timeout(480)]

KEYS = (*SHORT, *TP2, "trainer.save_freq=1")
FOR_EVER = "trainer.total_training_steps=1000"


@pytest.mark.exhaustive
def test_ends_without_ray(command_line) -> None:
    """Ctrl-C in a terminal reaches every process of two ranks: the step is saved, code 20. The next life goes on from
    there, and loses a rank: one sentence with its number, code 3. Nothing is left of either.

    Would not catch a rank that dies while it starts; tests/cluster have that.
    """
    stopped = command_line(*KEYS, WITHOUT_RAY, FOR_EVER, "trainer.stop_grace_s=30")
    stopped.wait_for(reached(stopped, 1))
    assert sorted(process.name().split()[1] for process in stopped.workers()) == ["0", "1"]
    os.killpg(stopped.process.pid, signal.SIGINT)
    assert stopped.wait() == 20, stopped.text()
    assert stopped.left_over() == []
    saved = steps_saved(stopped)[0]
    assert list(metrics(stopped)) == list(range(1, saved + 1))

    doomed = command_line(*KEYS, WITHOUT_RAY, FOR_EVER, folder=stopped.folder)
    doomed.wait_for(reached(doomed, saved + 1))
    (rank,) = (process for process in doomed.workers() if process.name().startswith("rank 1"))
    rank.kill()
    assert doomed.wait() == 3, doomed.text()
    text = " ".join(doomed.text().split())
    assert f"resuming after step {saved}" in text
    assert text.count("WorkerFailure") == 1 and "rank 1 (" in text, text
    assert "the process died during" in text or "the process died between two calls" in text, text
    assert "Traceback" not in text and doomed.left_over() == []


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("trainer.launcher=loca",), ("trainer.launcher=loca", "did you mean: local")),
        ((WITHOUT_RAY, "trainer.nnodes=2"), ("trainer.nnodes=2", WITHOUT_RAY, "try: ", "trainer.launcher=ray")),
    ],
    ids=["misspelt", "two nodes"],
)
def test_a_launcher_that_cannot_be_is_refused(command_line, keys: tuple[str, ...], said: tuple[str, ...]) -> None:
    """Code 2 and the nearest choice, before any process. Would not catch GPUs that are too few."""
    run = command_line(*SHORT, *keys)
    assert run.wait() == 2, run.text()
    text = " ".join(run.text().split())
    assert all(part in text for part in said) and "Traceback" not in text, text
    assert not run.run.exists() and run.left_over() == []
