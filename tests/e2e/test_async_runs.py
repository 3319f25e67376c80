"""Generation that runs ahead, as users start it: bounds, faults, replay and resume, by what runs write down."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil
import pytest
from command_line import LIMIT, is_in, stopped_in
from safetensors.torch import load_file
from short_runs import WITHOUT_RAY, steps_saved

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

ASYNC = "configs/async_cpu.yaml"
SMALL = (
    *("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=4"),
    *("actor_rollout_ref.rollout.max_num_seqs=24", "async_training.slice_steps=2", "trainer.n_gpus_per_node=1"),
    *("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1", "trainer.test_freq=2"),
)
ROWS = 16 * 4
FEW_STEPS = 20
NUM_LOSSES, MANY_STEPS = 2, 30
"""Enough for the losses and as many starts."""
MEASURED = ("timing_s/", "perf/", "reshard/", "memory/", "rollout/", "trainer/")
"""Metrics of clocks and memory, and of who waited for whom."""
COUNTED = [f"rollout/{name}" for name in ("renewed", "moved", "truncated", "resampled", "forgotten_tokens")]
"""Metrics that a replay repeats, although in it no replica dies and nothing is saved."""


def numbers(run) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in run.metrics().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in lines]


def counts(run) -> list[list[float]]:
    lines = [json.loads(line) for line in run.metrics().splitlines()]
    return [[line[name] for name in COUNTED] for line in lines if "staleness/max" in line]


def without_staleness(run) -> list[dict[str, float]]:
    return [{name: one for name, one in line.items() if not name.startswith("staleness/")} for line in numbers(run)]


def weights(run):
    return load_file(run.run / "hf_model" / "model.safetensors")


def weights_equal(run, other) -> bool:
    ours, theirs = weights(run), weights(other)
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in theirs)


def assert_same_bits(run, other) -> None:
    assert numbers(run) == numbers(other)
    assert weights_equal(run, other)


def trained(folder: Path) -> Counter[tuple[str, ...]]:
    """How often each prompt was trained."""
    counts: Counter[tuple[str, ...]] = Counter()
    for file in folder.iterdir():
        counts.update(json.loads(line)["input"] for line in file.read_text().splitlines())
    return counts


def replicas(run) -> list[psutil.Process]:
    """The processes that generate: of the second pool, whose titles have its name and their replica's number."""
    found = []
    for process in run.workers():
        with suppress(psutil.Error):  # it has just ended
            if " of rollout_pool" in "".join(process.cmdline()):
                found.append(process)
    return found


def events(run, kind: str) -> list[dict]:
    """Events so far; the run may be in the middle of writing the last line."""
    file = run.run / "schedule.jsonl"
    written = file.read_text().splitlines(keepends=True) if file.exists() else []
    lines = [json.loads(line) for line in written if line.endswith("\n")]
    return [line for line in lines if line["event"] == kind]


@pytest.mark.exhaustive
def test_a_run_that_lost_a_replica_goes_on_and_is_repeated(command_line, tmp_path: Path) -> None:
    """Through Ray, three steps ahead with partial rollouts, a replica killed in a slice, whose requests move. No token
    is older, all rows are trained, the lost replica starts again; a replay has the same metrics, counts and weights.

    Would not catch a loss inside a transfer; random kills do.
    """
    ahead = (
        *SMALL,
        "trainer.rollout_ahead=3",
        f"trainer.total_training_steps={FEW_STEPS}",
        "trainer.val_before_train=false",
    )
    run = command_line(*ahead, f"trainer.rollout_data_dir={tmp_path / 'samples'}", config=ASYNC)
    run.wait_for(lambda: len(events(run, "taken")) >= 2, interval=0.01)
    known, lost = replicas(run), []
    run.wait_for(lambda: lost.extend(filter(None, [stopped_in(known, "rollout.advance")])) or lost, interval=0.001)
    lost[0].kill()
    assert run.wait() == 0, run.text()
    assert "starts again, others continue" in run.text()
    assert len(events(run, "lost")) == 1 and run.left_over() == []
    steps = [line for line in numbers(run) if "staleness/max" in line]
    assert len(steps) == FEW_STEPS and max(line["staleness/max"] for line in steps) <= 3
    assert any(line["staleness/max"] > 0 for line in steps)
    assert sum(trained(tmp_path / "samples").values()) == FEW_STEPS * ROWS
    assert [one["step"] for one in events(run, "taken")] == list(range(1, FEW_STEPS + 1))

    again = command_line(*ahead, WITHOUT_RAY, f"--replay={run.run}", config=ASYNC)
    assert again.wait() == 0, again.text()
    assert_same_bits(again, run)
    assert counts(again) == counts(run) and sum(map(sum, counts(run))) > 0


def test_a_recorded_run_is_repeated_bit_for_bit(command_line) -> None:
    """In one process, where answers of two versions go on from step to step; another configuration is refused.

    Would not catch a replica that was lost; a longer test does.
    """
    small = (*SMALL, "--local", "--collapse", "trainer.total_training_steps=3", "trainer.val_before_train=false")
    small = (
        *small,
        "trainer.test_freq=5040",
        "actor_rollout_ref.rollout.max_num_seqs=48",
        "async_training.slice_steps=3",
    )
    run = command_line(*small, config=ASYNC)
    assert run.wait() == 0, run.text()
    again = command_line(*small, f"--replay={run.run}", config=ASYNC)
    other = command_line(*small, f"--replay={run.run}", "trainer.seed=9", config=ASYNC)
    assert again.wait() == 0, again.text()
    assert any(line.get("staleness/mixed_answers", 0) > 0 for line in numbers(run))
    assert_same_bits(again, run)
    assert other.wait() == 2 and "seed was 1, is 9" in other.text(), other.text()


@pytest.mark.exhaustive
@pytest.mark.weekly
def test_a_replica_that_is_lost_again_while_it_starts(command_line, tmp_path: Path) -> None:
    """Killed while it builds its engine, and the next stopped while all ranks meet: the run goes on, all rows are
    trained, and without partial rollouts no answer has two versions. Would not catch what only happens before the first
    meeting.
    """
    ahead = (*SMALL, "trainer.rollout_ahead=3", "trainer.total_training_steps=80", "trainer.val_before_train=false")
    ahead = (
        *ahead,
        WITHOUT_RAY,
        "trainer.test_freq=5040",
        "trainer.heartbeat_timeout_s=10",
        "async_training.partial_rollout=false",
    )
    run = command_line(*ahead, f"trainer.rollout_data_dir={tmp_path / 'samples'}", config=ASYNC)
    run.wait_for(lambda: len(events(run, "taken")) >= 2, interval=0.01)
    before = replicas(run)
    before[0].kill()

    def caught(method: str, how: int) -> bool:
        for one in replicas(run):
            with suppress(psutil.Error):
                if one not in before and is_in(one, method):
                    one.send_signal(how)
                    before.append(one)
                    return True
        return False

    run.wait_for(lambda: caught("host.build", signal.SIGKILL), interval=0.001)
    run.wait_for(lambda: caught("rollout.join_transfer", signal.SIGSTOP), interval=0.001)
    assert run.wait(600) == 0, run.text()
    assert run.text().count("starts again, others continue") >= 3 and run.left_over() == []
    assert sum(trained(tmp_path / "samples").values()) == 80 * ROWS
    assert not any(line.get("staleness/mixed_answers") for line in numbers(run))


@pytest.mark.exhaustive
@pytest.mark.weekly
def test_the_demo_is_learnt(command_line, tmp_path: Path) -> None:
    """On 2 + 2 processes, a step ahead: held-out accuracy of 0.90, no token older, every batch trained once.

    Would not catch slower learning than the synchronous run's.
    """
    run = command_line(
        f"trainer.rollout_data_dir={tmp_path / 'samples'}",
        WITHOUT_RAY,
        "trainer.rollout_ahead=1",
        "trainer.test_freq=5040",
        "trainer.val_before_train=false",
        config=ASYNC,
    )
    assert run.wait(800) == 0, run.text()
    lines = [line for line in numbers(run) if "staleness/max" in line]
    assert len(lines) == 20 and max(line["staleness/max"] for line in lines) <= 1
    assert sum(trained(tmp_path / "samples").values()) == 20 * 64 * 8
    assert json.loads((run.run / "summary.json").read_text())["val_accuracy_after"] >= 0.90
    slots = {one["lane"] for one in json.loads((run.run / "timeline.json").read_text())}
    assert any(lane.startswith("rollout_pool/") for lane in slots)


@pytest.mark.exhaustive
def test_interrupted_runs_go_on_bit_for_bit(command_line) -> None:
    """Killed with requests in flight, twice: while its first checkpoint is written, and two steps after it is there;
    it goes on from what it has and ends in the bits of the run that was left alone. The schedule is computed.

    Would not catch a schedule that depends on the number of processes, which is the same in all of them.
    """
    settings = (
        *(*SMALL, "trainer.rollout_ahead=2", "async_training.deterministic=true", "trainer.total_training_steps=6"),
        *(WITHOUT_RAY, "trainer.save_freq=2", "trainer.test_freq=5040", "trainer.val_before_train=false"),
    )
    whole = command_line(*settings, config=ASYNC)
    assert whole.wait() == 0, whole.text()
    folder = None
    for kind, number in (("saved", 1), ("taken", 4)):
        life = command_line(*settings, folder=folder, config=ASYNC)
        folder = life.folder
        life.wait_for(lambda: len(events(life, kind)) >= number, interval=0.01)  # noqa: B023
        life.kill_all()
    saved = steps_saved(life)[0]
    assert saved in (2, 4)  # a look at all processes may take as long as a step
    last = command_line(*settings, folder=folder, config=ASYNC)
    assert last.wait() == 0, last.text()
    assert f"resuming after step {saved}" in last.text()
    assert weights_equal(last, whole)
    assert numbers(last)[-3:] == numbers(whole)[-3:]


@pytest.mark.exhaustive
def test_no_step_ahead_on_replicas_is_the_split_synchronous_run(command_line) -> None:
    """Two replicas, bit for bit. Would not catch a replica that gets more rows than the other in both."""
    small = (*SMALL, "trainer.total_training_steps=2", "trainer.rollout_ahead=0")
    small = (*small, WITHOUT_RAY, "trainer.test_freq=5040", "trainer.val_before_train=false")
    sliced = command_line(*small, config=ASYNC)
    assert sliced.wait() == 0, sliced.text()
    plain = command_line(*small, "async_training.partial_rollout=false", config=ASYNC)
    assert plain.wait() == 0, plain.text()
    assert without_staleness(sliced) == numbers(plain) and weights_equal(sliced, plain)


@pytest.mark.exhaustive
def test_what_replicas_sampled_is_trained_again_from_the_record(command_line) -> None:
    """The keys stay, and the pool of its own, which validates. Would not catch a validation of other weights that score
    alike.
    """
    small = (*SMALL, WITHOUT_RAY, "trainer.total_training_steps=4", "trainer.recorded_prompts=-1")
    run = command_line(*small, config=ASYNC)
    assert run.wait() == 0, run.text()
    again = command_line(*small, "--rollouts-from", str(run.run), config=ASYNC)
    assert again.wait() == 0, again.text()
    assert max(line.get("staleness/max", 0) for line in numbers(run)) > 0
    assert_same_bits(again, run)


@pytest.mark.exhaustive
@pytest.mark.weekly
@pytest.mark.timeout(1800)
def test_a_run_that_lost_replicas_goes_on_and_is_repeated(command_line, tmp_path: Path) -> None:
    """Three steps ahead with partial rollouts, replicas killed or stopped at random moments, one after the other. No
    token is older, no row is lost or trained twice, each lost replica starts again, and a replay in which nothing dies
    has the same metrics and weights.

    Would not catch two losses at once.
    """
    rng = Random(7)
    settings = (*SMALL, "trainer.rollout_ahead=3", "async_training.max_replica_restarts=100", "trainer.test_freq=5040")
    settings = (*settings, "trainer.heartbeat_timeout_s=10", f"trainer.total_training_steps={MANY_STEPS}")
    settings = (*settings, WITHOUT_RAY, "trainer.val_before_train=false")
    run = command_line(*settings, f"trainer.rollout_data_dir={tmp_path / 'samples'}", config=ASYNC)
    for lost in range(NUM_LOSSES):
        run.wait_for(lambda: len(events(run, "back")) == lost and events(run, "taken"), LIMIT, interval=0.05)  # noqa: B023
        time.sleep(rng.uniform(0.0, 2.0))
        victim = rng.choice(replicas(run))
        victim.send_signal(rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))
    assert run.wait(900) == 0, run.text()
    assert "starts again, others continue" in run.text()
    assert len(events(run, "lost")) == NUM_LOSSES and run.left_over() == []
    assert [one["step"] for one in events(run, "taken")] == list(range(1, MANY_STEPS + 1))
    assert sum(trained(tmp_path / "samples").values()) == MANY_STEPS * ROWS
    staleness = [line["staleness/max"] for line in numbers(run) if "staleness/max" in line]
    assert len(staleness) == MANY_STEPS and 0 < max(staleness) <= 3
    again = command_line(*settings, f"--replay={run.run}", config=ASYNC)
    assert again.wait(600) == 0, again.text()
    assert_same_bits(again, run)
    assert counts(again) == counts(run)
