"""Dynamic sampling in asynchronous runs, as users start them: what is trained, resumed and repeated."""

from __future__ import annotations

import json

import pytest
from command_line import CommandLine, stopped_in
from safetensors.torch import load_file
from short_runs import LOCAL, SHORT, WITHOUT_RAY, reached, steps_saved
from test_async_runs import events, replicas

from megatron_rl.sampling.journal import Judged, StepTaken, read_events

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

NUM_STEPS, MANY = 4, 12
FILTER = (
    *("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=3"),
    *("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false", "actor_rollout_ref.rollout.n=4"),
    *("algorithm.rollout_correction.rollout_is=token", "trainer.rollout_ahead=1", "async_training.slice_steps=2"),
    *(f"trainer.total_training_steps={NUM_STEPS}", "trainer.save_freq=2"),
)
ONE_POOL = (
    *SHORT,
    *LOCAL,
    *FILTER,
    "async_training.partial_rollout=true",
    "actor_rollout_ref.rollout.longest_first=true",
)
ON_REPLICAS = (
    *("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.n_gpus_per_node=1"),
    *("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1", "trainer.test_freq=0", WITHOUT_RAY),
    *(*FILTER, "trainer.save_freq=0"),
)
MEASURED = ("timing_s/", "perf/", "reshard/", "memory/", "trainer/", "rollout/")


def numbers(run: CommandLine) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in run.metrics().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in lines]


def weights_equal(run: CommandLine, other: CommandLine) -> bool:
    ours, theirs = (load_file(each.run / "hf_model" / "model.safetensors") for each in (run, other))
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in theirs)


def check_journal(run: CommandLine, num_kept: int = 8) -> None:
    """Groups were replaced, and every step has all the kept groups that it could have."""
    events = read_events(run.run / "schedule.jsonl")
    verdicts = {event.group: event.verdict for event in events if isinstance(event, Judged)}
    dropped = {group for event in events if isinstance(event, StepTaken) for group in event.dropped}
    assert dropped and all(verdicts[group] != "kept" for group in dropped)
    lines = [line for line in numbers(run) if "train/differing_groups" in line]
    assert len(lines) == NUM_STEPS and any(line["train/num_gen_batches"] % 1 for line in lines)
    assert all(line["train/differing_groups"] == 1 or line["train/num_gen_batches"] == 3 for line in lines)
    assert all(0 <= line["train/dropped_tokens"] < 1 for line in lines)


def test_one_pool_resumes_and_repeats(command_line) -> None:
    """With partial rollouts and the longest first: a killed run that continues, and a replay, have the same numbers and
    weights. Would not catch a group that is replaced late: `tests/sampling/test_filtered_groups.py` does.
    """
    whole = command_line(*ONE_POOL)
    assert whole.wait() == 0, whole.text()
    check_journal(whole)
    assert max(line["staleness/max"] for line in numbers(whole) if "staleness/max" in line) <= 1
    life = command_line(*ONE_POOL)
    life.wait_for(reached(life, 3), interval=0.01)
    life.kill_all()
    saved = steps_saved(life)[0]
    last = command_line(*ONE_POOL, folder=life.folder)
    assert last.wait() == 0, last.text()
    assert f"resuming after step {saved}" in last.text()
    assert numbers(last)[-(NUM_STEPS - saved) :] == numbers(whole)[-(NUM_STEPS - saved) :]
    again = command_line(*ONE_POOL, "trainer.save_freq=0", f"--replay={whole.run}")
    assert again.wait() == 0, again.text()
    assert numbers(again) == numbers(whole)
    assert weights_equal(last, whole) and weights_equal(again, whole)


def test_replicas_repeat_it(command_line) -> None:
    """Two replicas that do not wait for each other, whose groups are judged while the trainer trains. Would not catch a
    replica that dies: the exhaustive test below does.
    """
    first = command_line(*ON_REPLICAS, config="configs/async_cpu.yaml")
    assert first.wait() == 0, first.text()
    check_journal(first)
    again = command_line(*ON_REPLICAS, f"--replay={first.run}", config="configs/async_cpu.yaml")
    assert again.wait() == 0, again.text()
    assert numbers(again) == numbers(first) and weights_equal(again, first)


@pytest.mark.exhaustive
def test_a_replica_is_lost_in_a_replacement(command_line) -> None:
    """Killed in a slice after groups were dropped: every step is trained, and no group is dropped twice. A replay,
    in which it is not lost, has the same metrics. Would not catch a replica that dies between two slices.
    """
    keys = (*ON_REPLICAS, f"trainer.total_training_steps={MANY}")
    run, lost = command_line(*keys, config="configs/async_cpu.yaml"), []
    run.wait_for(lambda: any(line["verdict"] == "uniform" for line in events(run, "judged")), interval=0.01)
    known = replicas(run)
    run.wait_for(lambda: lost.extend(filter(None, [stopped_in(known, "rollout.advance")])) or lost, interval=0.001)
    lost[0].kill()
    assert run.wait() == 0, run.text()
    assert len(events(run, "lost")) == 1 and run.left_over() == []
    taken = [event for event in read_events(run.run / "schedule.jsonl") if isinstance(event, StepTaken)]
    dropped = [group for event in taken for group in event.dropped]
    assert [event.step for event in taken] == list(range(1, MANY + 1)) and len(dropped) == len({*dropped}) > 0
    again = command_line(*keys, f"--replay={run.run}", config="configs/async_cpu.yaml")
    assert again.wait() == 0, again.text()
    assert numbers(again) == numbers(run) and weights_equal(again, run)
