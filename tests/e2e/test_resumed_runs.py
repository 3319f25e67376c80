"""A run that ended early goes on when the same command is given again, as if nothing had happened."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from command_line import REPOSITORY
from forked_run import ForkedRun
from listeners import listening, open_to_others
from lives import LOCAL, MEGATRON, ONE, SHORT, THROUGH, TP2, metrics, reached, steps_saved
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

pytestmark = [pytest.mark.dist, pytest.mark.timeout(480)]


TP2_TO_TP1 = (*TP2, "actor_rollout_ref.rollout.tensor_model_parallel_size=1")


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param(LOCAL, (), id="local"),
        pytest.param(ONE, ("--local",), id="one", marks=pytest.mark.exhaustive),
        pytest.param(TP2_TO_TP1, (), id="TP2-to-TP1", marks=pytest.mark.exhaustive),
    ],
)
def test_killed_run_goes_on_exactly(command_line, layout, options) -> None:
    """`kill -9` in step 5, after a save at 2 or 4: all metrics and the exported model are the uninterrupted run's.

    Saved beside training. In one process, or through Ray, where with one rank the uninterrupted run is in one process.
    The checkpoint of step 2 goes on with the same samples in one process, whatever it was saved in. Would not catch a
    clock that starts anew: those are left out.
    """
    keys = (*SHORT, *layout, "trainer.save_freq=2", "actor_rollout_ref.actor.checkpoint.async_save=true")
    whole, killed = command_line(*keys, *options), command_line(*keys)
    killed.wait_for(reached(killed, 4), timeout=240, interval=0.02)
    killed.process.kill()
    assert killed.wait(60) == -9
    assert killed.left_over(patience=60) == []
    saved = steps_saved(killed)[0]
    assert saved in (2, 4)
    resumed = command_line(*keys, folder=killed.folder)
    assert whole.wait(180) == 0, whole.text()
    assert steps_saved(whole) == [5, 4, 2]
    assert (whole.run / "latest_checkpointed_iteration.txt").read_text() == "5"
    assert resumed.wait(180) == 0, resumed.text()
    assert f"going on after step {saved}" in resumed.text()
    assert metrics(resumed) == metrics(whole)
    exported = [(run.run / "hf_model/model.safetensors").read_bytes() for run in (resumed, whole)]
    assert exported[0] == exported[1]

    for role in ("actor", "critic"):
        export(whole, role)
    ours, theirs = (load_file(whole.run / folder / "model.safetensors") for folder in ("exported_actor", "hf_model"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    critic, told = AutoModelForSequenceClassification.from_pretrained(
        whole.run / "exported_critic", output_loading_info=True
    )
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert critic.config.num_labels == 1 and critic.score.weight.abs().sum() > 0

    other = command_line(
        *SHORT, *LOCAL, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={whole.run / 'global_step_2'}"
    )
    assert other.wait(180) == 0, other.text()
    if layout is TP2_TO_TP1:
        assert "random generators start anew" in other.text()
        assert f"{MEGATRON}.tensor_model_parallel_size was 2, is 1" in other.text()
    ours, theirs = metrics(other), metrics(whole)
    assert list(ours) == [3, 4, 5]
    if layout is not TP2_TO_TP1:
        assert ours == {step: theirs[step] for step in ours}
    for name in ("critic/score/mean", "prompt_length/mean", "response_length/mean", "response_length/max"):
        assert [ours[step][name] for step in ours] == [theirs[step][name] for step in ours], name
    assert [ours[step]["actor/entropy"] for step in ours] == pytest.approx(
        [theirs[step]["actor/entropy"] for step in ours], rel=1e-4
    )


def export(run, role: str) -> None:
    """Through the command line, from the newest checkpoint."""
    target = run.run / f"exported_{role}"
    arguments = ["export", "--checkpoint", str(run.run), "--target", str(target), "--role", role]
    exporting = ForkedRun(arguments, REPOSITORY, {}, run.folder / f"export_{role}.txt")
    assert exporting.wait(60) == 0, (run.folder / f"export_{role}.txt").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive)])
def test_signal_saves_and_says_so(command_line, number: int) -> None:
    """The step is finished and saved. A next life, of which that was the last step, makes up for its validation alone.

    SIGTERM goes to the whole process group, as from a scheduler. The next life is in one process. Would not catch a
    signal before the first step.
    """
    keys = (*SHORT, "trainer.save_freq=1000", "trainer.stop_grace_s=30", "trainer.test_freq=1")
    stopped = command_line(*keys, *ONE, "trainer.total_training_steps=1000", typed=True)
    stopped.wait_for(reached(stopped, 2), timeout=240)
    found = listening(stopped.family())
    assert {"gcs_server", "raylet", "ray::RankHost"} <= {name for name, *_ in found}
    assert open_to_others(found) == set()  # docs/launching.md: what listens where
    if number == signal.SIGTERM:
        os.killpg(stopped.process.pid, number)
    else:
        stopped.process.send_signal(number)
    assert stopped.wait(60) == 20, stopped.text()
    assert stopped.left_over() == []
    [saved] = steps_saved(stopped)
    before = metrics(stopped)
    assert list(before) == list(range(1, saved + 1))
    if number == signal.SIGTERM:
        finished = command_line(*keys, *LOCAL, f"trainer.total_training_steps={saved}", folder=stopped.folder)
        assert finished.wait(180) == 0, finished.text()
        again = metrics(finished)
        made_up = {name: again[saved].pop(name) for name in [*again[saved]] if name.startswith("val-")}
        validated = {name: before[saved].pop(name) for name in [*before[saved]] if name.startswith("val-")}
        assert made_up and again == before and validated in ({}, made_up)
        assert (finished.run / "hf_model/model.safetensors").exists()


def slow_reward(folder: Path, seconds: float) -> tuple[str, Path]:
    """(the key of a reward function that sleeps once, the file that it leaves when it falls asleep)."""
    asleep, file = folder / "asleep", folder / "reward.py"
    file.write_text(
        "import pathlib, time\n"
        f"asleep = pathlib.Path({str(asleep)!r})\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if not asleep.exists():\n"
        "        asleep.touch()\n"
        f"        time.sleep({seconds})\n"
        "    return float(solution_str == ground_truth)\n"
    )
    return f"custom_reward_function.path={file}", asleep


@pytest.mark.parametrize("one", THROUGH)
def test_step_is_given_up_when_time_is_short(command_line, one, tmp_path: Path) -> None:
    """Nobody knows how long a first step takes, so it is abandoned: code 21, and the state before it is saved.

    Would not catch a step that is abandoned although it had time.
    """
    reward, asleep = slow_reward(tmp_path, 3)
    run = command_line(*SHORT, *one, "trainer.save_freq=1", reward)
    run.wait_for(asleep.exists, timeout=240)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(60) == 21, run.text()
    assert steps_saved(run) == [0]
    assert run.left_over() == []


@pytest.mark.exhaustive
def test_grace_is_bounded(command_line, tmp_path: Path) -> None:
    """A step that hangs ends with the grace: code 22, nothing left. Would not catch a worker that ignores SIGKILL."""
    reward, asleep = slow_reward(tmp_path, 600)
    run = command_line(*SHORT, *ONE, "trainer.save_freq=1", "trainer.stop_grace_s=2", reward)
    run.wait_for(asleep.exists, timeout=240)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(30) == 22, run.text()
    assert run.left_over() == []
    assert steps_saved(run) == []


def test_damaged_checkpoint_is_noticed(command_line) -> None:
    """One flipped bit: skipped for the checkpoint before, with the reason; refused by its path.

    Would not catch a bit that flips in memory.
    """
    keys = (*SHORT, *LOCAL, "trainer.save_freq=1", "trainer.total_training_steps=2", "trainer.export_hf=false")
    run = command_line(*keys)
    assert run.wait(180) == 0, run.text()
    damaged = next((run.run / "global_step_2/actor").glob("__0_*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    by_path = (f"trainer.resume_from_path={run.run / 'global_step_2'}", "trainer.resume_mode=resume_path")
    refused = command_line(*keys, *by_path, folder=run.folder)
    assert refused.wait(60) == 2, refused.text()
    assert "other content than was written" in refused.text().replace("\n", " ")
    resumed = command_line(*keys, folder=run.folder)
    assert resumed.wait(180) == 0, resumed.text()
    text = resumed.text().replace("\n", " ")
    assert "global_step_2" in text and "other content than was written" in text and "going on after step 1" in text
    assert steps_saved(resumed) == [2, 1]
    assert (run.run / "global_step_2.set_aside").is_dir()
