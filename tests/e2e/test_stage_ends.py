"""Whatever ends a stage before PPO costs nothing: signals, a rank that dies on another node, a full disk."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
from raylets import Raylets
from short_runs import LOCAL, TP2, WITHOUT_RAY, metrics, reached, steps_saved
from stage_files import keys_of, weights_apart

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive, pytest.mark.timeout(900)]

MANY = "trainer.total_training_steps=30"
SLOWLY = "actor_rollout_ref.actor.optim.lr=1e-4"
"""Adam makes much of rounding noise: at 1e-3 two layouts differ by 0.2% in the loss of step 19."""


THIRTY = (*LOCAL, MANY, "trainer.save_freq=1000", "trainer.test_freq=10")


def assert_alike(run, whole, name: str) -> None:
    """Losses and the exported model within rounding, as layouts differ."""
    ours, theirs = metrics(run), metrics(whole)
    assert ours.keys() == theirs.keys()
    for step, expected in theirs.items():
        for key in (f"{name}/loss", "val/loss"):
            assert (key in ours[step]) == (key in expected), (step, key)
            if key in expected:
                assert ours[step][key] == pytest.approx(expected[key], rel=2e-3, abs=1e-5), (step, key)
    assert weights_apart(run, whole) < 1e-4


@pytest.mark.parametrize(("stage", "number"), [("reward", signal.SIGINT), ("dpo", signal.SIGTERM)])
def test_a_signal_saves_and_the_stage_goes_on_exactly(
    command_line, recorded, files: Path, stage: str, number: int
) -> None:
    """In one process: code 20 after the step it was in, and then all metrics and the model are the uninterrupted run's,
    bit for bit. Would not catch a signal in a save, which tests/checkpoint have at every instant."""
    keys = (*keys_of(files, stage), *THIRTY)
    stopped = command_line(*keys, stage=stage)
    stopped.wait_for(reached(stopped, 3), interval=0.02)
    stopped.process.send_signal(number)
    assert stopped.wait() == 20, stopped.text()
    saved = steps_saved(stopped)[0]
    assert 3 <= saved < 30 and list(metrics(stopped))[-1] == saved
    resumed = command_line(*keys, folder=stopped.folder, stage=stage)
    whole = recorded(f"thirty steps of {stage}", *keys, stage=stage)
    assert resumed.wait() == 0, resumed.text()
    assert f"resuming after step {saved}" in resumed.text()
    assert metrics(resumed) == metrics(whole)
    exported = [(run.run / "hf_model/model.safetensors").read_bytes() for run in (resumed, whole)]
    assert exported[0] == exported[1]


def test_a_signal_ends_the_scoring_of_the_reference(command_line, files: Path) -> None:
    """Before the first step, while answers are scored: code 21 at once, and nothing is saved. Would not catch a chunk
    that takes longer than the grace."""
    keys = (*keys_of(files, "dpo"), *LOCAL, "data.train_batch_size=1")
    run = command_line(*keys, stage="dpo")
    run.wait_for(lambda: run.output.exists() and "examples per step" in run.text(), interval=0.02)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 21, run.text()
    assert "stopped before the first step; there was nothing to save" in run.text()
    assert steps_saved(run) == []


def test_a_scheduler_stops_a_stage_which_ends_in_one_process(command_line, files: Path) -> None:
    """SIGTERM to the process group of sft on two ranks of TP; the rest of the steps on one rank, within
    rounding of all of them there. Would not catch a signal before the first step."""
    keys = (*keys_of(files, "sft"), MANY, SLOWLY, "trainer.save_freq=1000", "trainer.test_freq=10")
    stopped = command_line(*keys, *TP2, WITHOUT_RAY, stage="sft")
    stopped.wait_for(reached(stopped, 2))
    os.killpg(stopped.process.pid, signal.SIGTERM)
    assert stopped.wait() == 20, stopped.text()
    assert stopped.left_over() == []
    saved = steps_saved(stopped)[0]
    resumed = command_line(*keys, *LOCAL, folder=stopped.folder, stage="sft")
    whole = command_line(*keys, *LOCAL, stage="sft")
    assert resumed.wait() == 0, resumed.text()
    assert whole.wait() == 0, whole.text()
    assert f"resuming after step {saved}" in resumed.text()
    assert_alike(resumed, whole, "actor")


def test_a_rank_of_another_node_dies(command_line, files: Path) -> None:
    """dpo on TP2 x PP2, a stage on each of two nodes, which are raylets on this machine: kill -9 of a rank on the
    second ends the run with its number and code 3; one process goes on from the newest checkpoint, with the reference's
    log-probs in it, and ends as one that had all steps, within rounding. Would not catch what only a real network
    does."""
    keys = (*keys_of(files, "dpo"), MANY, SLOWLY, "trainer.save_freq=2", "trainer.test_freq=10")
    two = ("trainer.nnodes=2", "trainer.n_gpus_per_node=2")
    whole = command_line(*keys, *LOCAL, stage="dpo")
    assert whole.wait() == 0, whole.text()
    with Raylets(2, 2) as cluster:
        killed = command_line(*keys, *two, stage="dpo", variables=cluster.variables)
        killed.wait_for(reached(killed, 3))
        rank, victim = cluster.ranks(1).popitem()
        victim.kill()
        assert killed.wait() == 3, killed.text()
        said = killed.text().replace("\n", " ")
        assert f"rank {rank}" in said and "died" in said and "megatron_rl/cli.py" not in said
        assert cluster.left_over() == {} and killed.left_over() == []
        saved = steps_saved(killed)[0]
        assert 2 <= saved < 30
    resumed = command_line(*keys, *LOCAL, folder=killed.folder, stage="dpo")
    assert resumed.wait() == 0, resumed.text()
    assert f"resuming after step {saved}" in resumed.text()
    assert_alike(resumed, whole, "actor")


def test_a_full_disk_ends_a_stage_and_costs_the_steps_since_its_checkpoint(command_line, recorded, files: Path) -> None:
    """From step 2 on no file may grow beyond half a megabyte: the next save ends the run with one sentence and code 7;
    the same command with room goes on exactly. Would not catch what a file system does to other files when it is full.
    """
    keys = (*keys_of(files, "dpo"), *THIRTY, "trainer.save_freq=2")
    full = command_line(*keys, stage="dpo")
    full.wait_for((full.run / "global_step_2").exists, interval=0.02)
    resource.prlimit(full.process.pid, resource.RLIMIT_FSIZE, (500_000, 500_000))
    assert full.wait() == 7, full.text()
    (error,) = (line for line in full.text().splitlines() if line.startswith("StorageError"))
    assert f"could not be written to {full.run}" in error and "the last complete checkpoint is global_step_" in error
    assert "Traceback" not in full.text() and not list(full.run.glob("*.unfinished"))
    saved = steps_saved(full)[0]
    resumed = command_line(*keys, folder=full.folder, stage="dpo")
    whole = recorded("thirty steps of dpo", *keys_of(files, "dpo"), *THIRTY, stage="dpo")
    assert resumed.wait() == 0, resumed.text()
    assert f"resuming after step {saved}" in resumed.text()
    assert metrics(resumed) == metrics(whole)


def test_a_folder_that_cannot_be_written_is_refused_at_once(command_line, files: Path) -> None:
    """Before anything is read or started. Would not catch a folder that becomes read-only later."""
    keys = (*keys_of(files, "reward"), *LOCAL, "trainer.default_local_dir=/proc/no_folder/run")
    run = command_line(*keys, stage="reward", names_folder=False)
    assert run.wait() == 2, run.text()
    rule = "must be a folder that can be created and written"
    assert f"trainer.default_local_dir=/proc/no_folder/run {rule}" in run.text()
