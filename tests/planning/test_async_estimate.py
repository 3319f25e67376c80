"""What the plan says of generation that runs ahead: by hand where answers are equal, and for whole configurations."""

from __future__ import annotations

from cProfile import Profile
from pathlib import Path

import pytest

from megatron_rl.config.load import load_config
from megatron_rl.config.schema import RunConfig
from megatron_rl.planning.async_estimate import AsyncEstimate, Sides, batch_lengths, rows_of_replica
from megatron_rl.planning.hardware import load_hardware
from megatron_rl.planning.preflight import preflight
from megatron_rl.planning.run_plan import RunPlan
from megatron_rl.planning.step_load import Load
from megatron_rl.sampling.engine_model import Costs
from megatron_rl.sampling.schedule_types import ScheduleConfig

MODELS = Path(__file__).parents[2] / "configs" / "models"
ROLLOUT, MEGATRON = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.megatron"
FILE = """
data: {train_files: a, val_files: b, max_prompt_length: 1024, max_response_length: 4096, train_batch_size: 384}
algorithm: {adv_estimator: grpo, rollout_correction: {rollout_is: token}}
"""


@pytest.fixture
def config(tmp_path):
    def config(training: int, rollout: int, *overrides: str) -> RunConfig:
        """Llama-3-70B at TP8 PP4, and replicas of 8 ranks."""
        file = tmp_path / "run.yaml"
        file.write_text(FILE)
        split = [f"trainer.nnodes={training // 8}", f"{ROLLOUT}.n=8", f"{ROLLOUT}.tensor_model_parallel_size=8"]
        if rollout:
            split += [f"pools.gen.nnodes={rollout // 8}", "pools.gen.n_gpus_per_node=8", f"{ROLLOUT}.pool=gen"]
        sizes = [f"{MEGATRON}.tensor_model_parallel_size=8", f"{MEGATRON}.pipeline_model_parallel_size=4"]
        sizes += [f"{MEGATRON}.dtype=bfloat16", "actor_rollout_ref.actor.ppo_mini_batch_size=96"]
        model = f"actor_rollout_ref.model.path={MODELS / 'llama-3-70b'}"
        found = load_config(file, [model, *split, *sizes, f"{ROLLOUT}.kv_cache_memory_bytes=20000000000", *overrides])
        assert list(map(str, preflight(found, config_only=True))) == []
        return found

    return config


EVEN = Sides(8, 8)


def plan(costs: Costs, sides: Sides = EVEN, **rules) -> AsyncEstimate:
    """Of one replica that draws two rows of 10 tokens at a time."""
    known = {"batch_rows": 2, "num_steps_total": 13, "ahead": 1, "slice_steps": 10, "max_running": 2} | rules
    return AsyncEstimate.of(ScheduleConfig(**known), 1, lambda request, attempt: 10, costs, sides)


def test_the_rollout_waits_by_hand():
    """10 s to draw, 18 s to train, 2 s to send: 30 s in turns, 20 s ahead, as training never waits; the rollout works
    for half of them. Each batch is drawn while the one before is trained. Rates of 20 s x 8 and 10 s x 8 are even at
    2 : 1 of the 16 ranks, which 11 : 5 is next to.

    Would not catch transfers that last longer than they hold the trainer up.
    """
    found = plan(Costs(lambda running: 1.0, 18.0, 2.0, 2.0))
    assert (found.in_turns_s, found.ahead_s, found.trainer_s, found.rollout_s) == (30.0, 20.0, 20.0, 10.0)
    assert (found.trainer_idle, found.rollout_idle) == (0.0, 0.5)
    assert (found.mean_staleness, found.most_staleness) == (1.0, 1)
    assert found.advice == (
        "the rollout waits for training: about 11 : 5 ranks (training : rollout) in place of 8 : 8 would balance them"
    )


def test_training_waits_by_hand():
    """10 s to draw, 5 s to train: a step takes 10 s, half of which training waits; 5.33 : 10.67 of 16 ranks, in
    replicas of 4 ranks 4 : 12. Would not catch a wrong rounding of other sizes.
    """
    found = plan(Costs(lambda running: 1.0, 5.0), Sides(8, 8, 4))
    assert (found.in_turns_s, found.ahead_s) == (15.0, 10.0)
    assert (found.trainer_idle, found.rollout_idle) == (0.5, 0.0)
    assert "training waits for the rollout: about 4 : 12 ranks" in found.advice


def test_balanced_sides_are_left_alone():
    """10 s each. Would not catch a run that is only balanced in the mean."""
    found = plan(Costs(lambda running: 1.0, 10.0), ahead=2, num_steps_total=15)
    assert found.ahead_s == 10.0 and found.advice == "training and rollout are balanced at 8 : 8 ranks"


def test_long_answers_hold_both_sides_up():
    """One of four answers takes 40 s, the others 2 s, and each has one version, so that nothing is begun before the
    long one has ended: a step takes 40 s, of which training needs 8. At its best rate, with 8 running, the engine draws
    46 tokens in 5.75 s. More ranks would not help. Would not catch advice that staleness forbids.
    """
    rules, costs = (
        ScheduleConfig(4, 13, 1, slice_steps=2, max_running=8, partial=False),
        Costs(lambda running: 1.0, 8.0),
    )
    found = AsyncEstimate.of(rules, 1, lambda request, attempt: 2 if request % 4 else 40, costs, EVEN)
    assert (found.ahead_s, found.trainer_idle, found.rollout_s) == (40.0, 0.8, 5.75)
    assert found.advice == (
        "the longest responses delay both sides, which another split of the ranks hardly changes: raise "
        "trainer.rollout_ahead above 1 or set async_training.partial_rollout=true, if that staleness is acceptable"
    )


def test_a_side_that_waits_where_no_share_is_better():
    """One rank each, 10 s to draw and 20 s to train. Would not catch more ranks that would help."""
    found = plan(Costs(lambda running: 1.0, 20.0), Sides(1, 1))
    assert found.advice == (
        "the rollout waits for training, and no other share of these ranks is nearer to balance than 1 : 1"
    )


@pytest.mark.parametrize(
    ("sides", "trainer_s", "rollout_s", "expected"),
    [
        (Sides(96, 32, 8), 1.0, 3.0, (64, 64)),
        (Sides(96, 32, 8), 1.0, 1.0, (96, 32)),
        (Sides(8, 8, 8), 1.0, 100.0, (8, 8)),
        (Sides(8, 8, 4), 100.0, 1.0, (12, 4)),
        (Sides(1, 1, 1), 5.0, 1.0, (1, 1)),
    ],
)
def test_balanced_ranks(sides, trainer_s, rollout_s, expected):
    """By hand; each side keeps a replica or a rank. Would not catch a layout that needs more ranks for training."""
    found = sides.balanced(trainer_s, rollout_s)
    assert (found.training, found.rollout) == expected


def test_lengths_of_a_batch():
    """The same in every batch, in another order: about the mean, with the longest of all samples. Would not catch
    lengths that depend on the prompt.
    """
    load = Load(num_samples=4096, prompt=100, response=500.0, max_response=4096, mini_batch=1, block_tokens=1)
    lengths = batch_lengths(load, 4, 16)
    rows = rows_of_replica(load, 16) * 4
    assert rows == 128
    first, second = ([lengths(batch * rows + row, 0) for row in range(rows)] for batch in (0, 1))
    assert sorted(first) == sorted(second) and first != second
    assert sum(first) / rows == pytest.approx(500, rel=0.04)
    assert max(first) > 3000 and min(first) >= 1


MOST_CALLS = 2_000_000
"""Of Python functions; of 1.3 million."""


def test_the_plan_of_a_large_run(config):
    """In turns it takes what the plan's own phases take; ahead never less than either side. It costs few calls.

    Would not catch a simulation that is wrong about real engines.
    """
    given, hardware = (
        config(96, 32, "trainer.rollout_ahead=2", "async_training.partial_rollout=true"),
        load_hardware("h100"),
    )
    calls = Profile(builtins=False)
    found = calls.runcall(RunPlan.of, given, hardware, (512.0, 800.0))
    assert sum(entry.callcount for entry in calls.getstats()) < MOST_CALLS
    ahead = found.ahead
    assert ahead is not None and ahead.in_turns_s == pytest.approx(found.step_seconds)
    assert max(ahead.trainer_s, ahead.rollout_s) <= ahead.ahead_s * 1.02 and ahead.ahead_s < found.step_seconds
    assert 0 < ahead.mean_staleness <= ahead.most_staleness == 2
    assert found.as_json()["ahead"]["advice"] in found.notes()
    assert "Asynchronous training, simulated" in [table.title for table in found.tables()]


@pytest.mark.parametrize(
    ("rollout", "overrides"),
    [
        (32, ()),
        pytest.param(0, ("async_training.partial_rollout=true",), marks=pytest.mark.exhaustive),
        pytest.param(0, (), marks=pytest.mark.exhaustive),
    ],
    ids=["split", "colocated, partial", "colocated"],
)
def test_nothing_new_where_nothing_runs_ahead(config, rollout, overrides):
    """Would not catch a note that says the same in other words."""
    found = RunPlan.of(config(96, rollout, *overrides), load_hardware("h100"))
    assert found.ahead is None and "ahead" not in found.as_json()
    assert "Asynchronous training, simulated" not in [table.title for table in found.tables()]
