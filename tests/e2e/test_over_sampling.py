"""Steps that leave late groups to the next one, as users start them: what is trained, resumed and repeated."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from command_line import CommandLine
from safetensors.torch import load_file
from short_runs import LOCAL, SHORT, WITHOUT_RAY, reached, steps_saved

from megatron_rl.checkpoint.folders import find

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

NUM_STEPS, NUM_PROMPTS, NUM_SAMPLES = 6, 8, 4
RATE = "actor_rollout_ref.rollout.over_sample_rate=0.3"
LATE = (
    *("trainer.rollout_ahead=2", "async_training.partial_rollout=true", "async_training.slice_steps=1"),
    *("algorithm.rollout_correction.rollout_is=token", "actor_rollout_ref.rollout.temperature=1.5"),
    "data.max_response_length=16",
)
SETTINGS = (
    *(*SHORT, *LOCAL, f"actor_rollout_ref.rollout.n={NUM_SAMPLES}", f"trainer.total_training_steps={NUM_STEPS}"),
    *("trainer.rollout_ahead=2", "async_training.partial_rollout=true", "async_training.slice_steps=1"),
    *("algorithm.rollout_correction.rollout_is=token", "trainer.save_freq=3"),
)
MEASURED = ("timing_s/", "perf/", "reshard/", "memory/")


def numbers(run: CommandLine) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in run.metrics().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in lines]


def weights_equal(run: CommandLine, other: CommandLine) -> bool:
    ours, theirs = (load_file(each.run / "hf_model" / "model.safetensors") for each in (run, other))
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in theirs)


def samples(folder: Path) -> list[Counter[str]]:
    """How often each prompt was trained, of every step."""
    files = sorted(folder.iterdir(), key=lambda file: int(file.stem))
    return [Counter(json.loads(line)["input"] for line in file.read_text().splitlines()) for file in files]


def test_late_groups_are_trained_later(command_line, tmp_path: Path) -> None:
    """Every batch is whole groups of as many prompts as ever, some later than without; over the run each prompt is
    trained as often. A run that is killed and goes on, and one that repeats the schedule, have the same numbers and
    weights.

    Would not catch a group that takes other samples along: `tests/sampling/test_straggler_swap.py` follows each.
    """
    dumped = {name: f"trainer.rollout_data_dir={tmp_path / name}" for name in ("plain", "late")}
    plain = command_line(*SETTINGS, dumped["plain"])
    assert plain.wait() == 0, plain.text()
    late = command_line(*SETTINGS, RATE, dumped["late"])
    assert late.wait() == 0, late.text()
    lines = [line for line in numbers(late) if "rollout/late_groups" in line]
    assert len(lines) == NUM_STEPS and sum(line["rollout/late_groups"] for line in lines) > 0
    assert 0 < max(line["staleness/max"] for line in lines) <= 2
    ours, theirs = samples(tmp_path / "late"), samples(tmp_path / "plain")
    assert ours != theirs and sum(ours, Counter()) == sum(theirs, Counter())
    assert all(sum(step.values()) == NUM_PROMPTS * NUM_SAMPLES for step in ours)
    assert all(times % NUM_SAMPLES == 0 for step in ours for times in step.values())

    life = command_line(*SETTINGS, RATE)
    life.wait_for(reached(life, 4), interval=0.01)
    life.kill_all()
    saved = steps_saved(life)[0]
    assert len(load_file(find(life.run)[0].path / "rollouts.safetensors")["moved"])
    last = command_line(*SETTINGS, RATE, folder=life.folder)
    assert last.wait() == 0, last.text()
    assert f"resuming after step {saved}" in last.text()
    assert numbers(last)[-(NUM_STEPS - saved) :] == numbers(late)[-(NUM_STEPS - saved) :]
    assert weights_equal(last, late)

    again = command_line(*SETTINGS, RATE, "trainer.save_freq=0", f"--replay={late.run}")
    assert again.wait() == 0, again.text()
    assert numbers(again) == numbers(late) and weights_equal(again, late)


TURNS = "actor_rollout_ref.rollout.multi_turn"
TWO_POOLS = (
    *("actor_rollout_ref.rollout.max_num_seqs=24", "trainer.n_gpus_per_node=1", WITHOUT_RAY),
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        ("remax", LOCAL),
        ("grpo", (*LOCAL, "async_training.straggler_policy=resample", "async_training.straggler_slices=1")),
        (
            "grpo",
            (
                *(*LOCAL, f"{TURNS}.enable=true", f"{TURNS}.environment.path=tests/e2e/agents_for_tests.py"),
                *(f"{TURNS}.environment.name=Retry", "custom_reward_function.path=null", f"{TURNS}.num_workers=2"),
                "custom_reward_function.name=null",
            ),
        ),
        ("async", TWO_POOLS),
    ],
    ids=["ReMax", "stragglers", "turns", "replicas"],
)
def test_late_groups_beside(command_line, recipe, keys) -> None:
    """Groups are late, none is too old, and the recorded schedule is repeated with the same numbers and weights.

    Would not catch a rare order of events: `tests/sampling` has thousands.
    """
    steps = (*SHORT, f"actor_rollout_ref.rollout.n={NUM_SAMPLES}", "trainer.total_training_steps=3", *LATE, RATE)
    config = f"configs/{recipe}_cpu.yaml"
    run = command_line(*steps, *keys, config=config)
    assert run.wait() == 0, run.text()
    assert sum(line.get("rollout/late_groups", 0) for line in numbers(run)) > 0
    assert 0 < max(line.get("staleness/max", 0) for line in numbers(run)) <= 2
    again = command_line(*steps, *keys, f"--replay={run.run}", config=config)
    assert again.wait() == 0, again.text()
    assert weights_equal(again, run)
