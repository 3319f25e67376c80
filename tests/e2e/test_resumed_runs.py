"""A run that ended early goes on when the same command is given again, as if nothing had happened."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from command_line import REPOSITORY, CommandLine
from forked_run import ForkedRun
from listeners import listening, open_to_others
from recorded_runs import RecordedRun
from safetensors.torch import load_file
from short_runs import LOCAL, MEGATRON, ONE, SHORT, TP2, WITHOUT_RAY, metrics, reached, steps_saved
from transformers import AutoModelForSequenceClassification

pytestmark = [pytest.mark.dist, pytest.mark.timeout(480)]


TP2_TO_TP1 = (*TP2, WITHOUT_RAY, "actor_rollout_ref.rollout.tensor_model_parallel_size=1")


SAVING = ("trainer.save_freq=2", "actor_rollout_ref.actor.checkpoint.async_save=true")


@pytest.fixture
def five_steps(recorded) -> RecordedRun:
    """In one process, saved beside training after steps 2, 4 and 5, and exported."""
    return recorded("five steps", *SHORT, *LOCAL, *SAVING)


@pytest.mark.parametrize(
    "layout", [LOCAL, pytest.param((*ONE, WITHOUT_RAY), marks=pytest.mark.exhaustive)], ids=["local", "a rank"]
)
def test_killed_run_goes_on_exactly(command_line, five_steps, layout) -> None:
    """`kill -9` in step 5, after a save at 2 or 4: all metrics and the exported model are the bits of a run in one
    process that was left alone, whether the killed one is in one process or has a rank of its own.

    Saved beside training. Would not catch a clock that starts anew: those are left out.
    """
    resumed = killed_and_resumed(command_line, *SHORT, *layout, *SAVING)
    assert_same(resumed, five_steps)


@pytest.mark.exhaustive
def test_killed_run_of_two_ranks_goes_on_exactly_and_elsewhere(command_line, tmp_path: Path) -> None:
    """The same of TP2 that generates on TP1 without Ray, killed there and resumed through Ray, against a run of two
    ranks, too, that was left alone without Ray and whose export is its model; the checkpoint of step 2 goes on in one
    process, with the same samples. Would not catch other layouts, which tests/dist have, nor what both launchers do
    wrong: runs in one process do.
    """
    keys = (*SHORT, *TP2_TO_TP1, *SAVING)
    whole = command_line(*keys)
    resumed = killed_and_resumed(command_line, *keys, then=("trainer.launcher=ray",))
    assert whole.wait() == 0, whole.text()
    assert_same(resumed, whole)
    assert_exported(whole, tmp_path)

    by_path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={whole.run / 'global_step_2'}")
    other = command_line(*SHORT, *LOCAL, *by_path)
    assert other.wait() == 0, other.text()
    assert "random generators start from their seed" in other.text()
    assert f"{MEGATRON}.tensor_model_parallel_size was 2, is 1" in other.text()
    ours, theirs = metrics(other), metrics(whole)
    assert list(ours) == [3, 4, 5]
    for name in ("critic/score/mean", "prompt_length/mean", "response_length/mean", "response_length/max"):
        assert [ours[step][name] for step in ours] == [theirs[step][name] for step in ours], name
    assert [ours[step]["actor/entropy"] for step in ours] == pytest.approx(
        [theirs[step]["actor/entropy"] for step in ours], rel=1e-4
    )


def killed_and_resumed(command_line, *keys: str, then: tuple[str, ...] = ()) -> CommandLine:
    """The second life, with the keys `then`, too, of a run that was killed in step 5, at its end."""
    killed = command_line(*keys)
    killed.wait_for(reached(killed, 4), interval=0.02)
    assert not [title for title in killed.titles() if "raylet" in title or "gcs_server" in title]
    killed.process.kill()
    assert killed.wait() == -9
    assert killed.left_over() == []
    saved = steps_saved(killed)[0]
    assert saved in (2, 4)
    resumed = command_line(*keys, *then, folder=killed.folder)
    assert resumed.wait() == 0, resumed.text()
    assert f"resuming after step {saved}" in resumed.text() and resumed.left_over() == []
    return resumed


def assert_same(resumed: CommandLine, whole: CommandLine | RecordedRun) -> None:
    """Metrics and the exported model, bit for bit."""
    assert metrics(resumed) == metrics(whole)
    exported = [(run.run / "hf_model/model.safetensors").read_bytes() for run in (resumed, whole)]
    assert exported[0] == exported[1]


def test_what_a_run_has_saved_is_exported(five_steps, tmp_path: Path) -> None:
    """Would not catch a checkpoint of several ranks; the test of two ranks does."""
    assert_exported(five_steps, tmp_path)


def assert_exported(run: CommandLine | RecordedRun, folder: Path) -> None:
    """The export of the newest checkpoint's actor is the model that the run left, that of its critic a classifier."""
    assert steps_saved(run) == [5, 4, 2]
    assert (run.run / "latest_checkpointed_iteration.txt").read_text() == "5"
    for role in ("actor", "critic"):
        export(run, role, folder / role)
    ours, theirs = (load_file(at / "model.safetensors") for at in (folder / "actor", run.run / "hf_model"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    critic, told = AutoModelForSequenceClassification.from_pretrained(folder / "critic", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert critic.config.num_labels == 1 and critic.score.weight.abs().sum() > 0


def export(run: CommandLine | RecordedRun, role: str, target: Path) -> None:
    """Through the command line, from the newest checkpoint."""
    arguments = ["export", "--checkpoint", str(run.run), "--target", str(target), "--role", role]
    said = target.with_suffix(".txt")
    assert ForkedRun(arguments, REPOSITORY, {}, said).wait() == 0, said.read_text()


def test_signal_saves_and_says_so(command_line) -> None:
    """The step is finished and saved. A next life, of which that was the last step, makes up for its validation alone.

    SIGTERM goes to the whole process group, as from a scheduler. The next life is in one process. Would not catch a
    signal before the first step.
    """
    keys = (*SHORT, "trainer.save_freq=1000", "trainer.stop_grace_s=30", "trainer.test_freq=1")
    stopped = command_line(*keys, *ONE, "trainer.total_training_steps=1000")
    stopped.wait_for(reached(stopped, 2))
    expected = {"gcs_server", "raylet", "ray::NodeAgent"}  # no step waits for the agent of the driver's own node
    stopped.wait_for(lambda: expected <= {name for name, *_ in listening(stopped.family())})
    assert open_to_others(listening(stopped.family())) == set()  # docs/scale/launching.md: what listens where
    os.killpg(stopped.process.pid, signal.SIGTERM)
    assert stopped.wait() == 20, stopped.text()
    assert stopped.left_over() == []
    [saved] = steps_saved(stopped)
    before = metrics(stopped)
    assert list(before) == list(range(1, saved + 1))
    finished = command_line(*keys, *LOCAL, f"trainer.total_training_steps={saved}", folder=stopped.folder)
    assert finished.wait() == 0, finished.text()
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


def test_step_is_given_up_when_time_is_short(command_line, tmp_path: Path) -> None:
    """Nobody knows how long a first step takes, so it is abandoned: code 21, and the state before it is saved.

    Would not catch a step that is abandoned although it had time.
    """
    reward, asleep = slow_reward(tmp_path, 3)
    run = command_line(*SHORT, *LOCAL, "trainer.save_freq=1", reward)
    run.wait_for(asleep.exists)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 21, run.text()
    assert steps_saved(run) == [0]
    assert run.left_over() == []


@pytest.mark.exhaustive
def test_grace_is_bounded(command_line, tmp_path: Path) -> None:
    """A step that hangs ends with the grace: code 22, nothing left. Would not catch a worker that ignores SIGKILL."""
    reward, asleep = slow_reward(tmp_path, 600)
    run = command_line(*SHORT, *ONE, WITHOUT_RAY, "trainer.save_freq=1", "trainer.stop_grace_s=2", reward)
    run.wait_for(asleep.exists)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 22, run.text()
    assert run.left_over() == []
    assert steps_saved(run) == []


def test_damaged_checkpoint_is_noticed(command_line, five_steps, tmp_path: Path) -> None:
    """One flipped bit in the last: skipped for the checkpoint before, with the reason, from where step 5 is repeated
    exactly; refused by its path. Would not catch a bit that flips in memory.
    """
    keys = (*SHORT, *LOCAL, *SAVING)
    folder = five_steps.copy(tmp_path / "copy")
    damaged = next((folder / "run/global_step_5/actor").glob("__0_*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    by_path = (f"trainer.resume_from_path={folder / 'run/global_step_5'}", "trainer.resume_mode=resume_path")
    refused = command_line(*keys, *by_path, folder=folder)
    assert refused.wait() == 2, refused.text()
    assert "other content than was written" in refused.text().replace("\n", " ")
    resumed = command_line(*keys, folder=folder)
    assert resumed.wait() == 0, resumed.text()
    text = resumed.text().replace("\n", " ")
    assert "global_step_5" in text and "other content than was written" in text and "resuming after step 4" in text
    assert steps_saved(resumed) == [5, 4, 2]
    assert (resumed.run / "global_step_5.set_aside").is_dir()
    assert_same(resumed, five_steps)
