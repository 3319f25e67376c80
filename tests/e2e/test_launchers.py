"""Ranks of one machine without Ray: the bits that they have through Ray, and the same ends."""

from __future__ import annotations

import os
import signal

import pytest
from short_runs import SHORT, TP2, WITHOUT_RAY, metrics, reached, steps_saved

pytestmark = [pytest.mark.dist, pytest.mark.timeout(480)]

THROUGH_RAY = "trainer.launcher=ray"
KEYS = (*SHORT, *TP2, "trainer.save_freq=1")
FOR_EVER = "trainer.total_training_steps=1000"


@pytest.mark.exhaustive
def test_either_launcher_goes_on_from_the_other(command_line) -> None:
    """`kill -9` of a driver whose ranks it started itself, after the checkpoint of step 2; through Ray to the end. All
    metrics and the exported model are the bits of a run without Ray that was left alone; nothing is left of either.

    Would not catch what both launchers do wrong; runs in one process do.
    """
    killed = command_line(*KEYS, WITHOUT_RAY, FOR_EVER)
    killed.wait_for((killed.run / "global_step_2").exists, interval=0.02)
    assert not [title for title in killed.titles() if "raylet" in title or "gcs_server" in title]
    killed.process.kill()
    assert killed.wait() == -9
    assert killed.left_over() == []
    saved = steps_saved(killed)[0]
    last = f"trainer.total_training_steps={saved + 1}"
    resumed = command_line(*KEYS, THROUGH_RAY, last, folder=killed.folder)
    assert resumed.wait() == 0, resumed.text()
    assert f"going on after step {saved}" in resumed.text()
    whole = command_line(*KEYS, WITHOUT_RAY, last)
    assert whole.wait() == 0, whole.text()
    assert metrics(resumed) == metrics(whole)
    exported = [(run.run / "hf_model/model.safetensors").read_bytes() for run in (resumed, whole)]
    assert exported[0] == exported[1]
    assert resumed.left_over() == whole.left_over() == []


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
    assert f"going on after step {saved}" in text
    assert text.count("WorkerFailure") == 1 and "rank 1 (" in text and "the process died during" in text, text
    assert "Traceback" not in text and doomed.left_over() == []


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("trainer.launcher=loca",), ("trainer.launcher=loca", "nearest: local")),
        ((WITHOUT_RAY, "trainer.nnodes=2"), ("trainer.nnodes=2", WITHOUT_RAY, "nearest: ", "trainer.launcher=ray")),
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
