"""Points of a grid, their names and keys, and which of them have to run."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from megatron_rl.config.setting import TAKEN_AWAY
from megatron_rl.errors import ConfigError
from megatron_rl.trials.ablation_file import AblationConfig
from megatron_rl.trials.points import Point, name_of, points_of, short_names
from megatron_rl.trials.record import Record, must_run, read_record, write_record
from megatron_rl.trials.result import result_of
from megatron_rl.trials.trial_outcome import TrialOutcome

TP = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"
PP = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size"
ROLLOUT_TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"
PACKED = "actor_rollout_ref.actor.use_dynamic_bsz"
ABLATION = AblationConfig(
    "base.yaml",
    overrides={"trainer.seed": 7},
    grid={TP: [1, 2], ROLLOUT_TP: [1, 2]},
    points=[{"name": "packed", TP: 2, ROLLOUT_TP: 2, PACKED: True}, {TP: 1, ROLLOUT_TP: 1}],
    exclude=[{TP: 1, ROLLOUT_TP: 2}],
)
BASE = {"trainer.seed": 1, "trainer.device": "cpu"}


def test_points_of_a_grid():
    """By hand: 2 x 2, less the excluded one, and one of the explicit ones, as the other is in the grid already."""
    points = points_of(ABLATION, BASE)
    assert [point.name for point in points] == ["tp1-rollout_tp1", "tp2-rollout_tp1", "tp2-rollout_tp2", "packed"]
    assert points[1].own == {TP: 2, ROLLOUT_TP: 1}
    assert points[3].settings == {"trainer.seed": 7, TP: 2, ROLLOUT_TP: 2, PACKED: True}
    assert points[3].overrides == ["trainer.seed=7", f"{TP}=2", f"{ROLLOUT_TP}=2", f"{PACKED}=true"]


def test_keys_of_verl_are_translated_first():
    """Axes, exclusions and overrides by verl's names; a removed key; an axis that changes nothing is one run, and said.

    Would not catch a key whose meaning depends on another axis.
    """
    theirs = dataclasses.replace(
        ABLATION,
        overrides={"trainer.max_actor_ckpt_to_keep": 2, "trainer.seed": TAKEN_AWAY},
        grid={TP: [1, 2], "actor_rollout_ref.rollout.name": ["vllm", "sglang"]},
        points=[],
        exclude=[{"trainer.max_critic_ckpt_to_keep": None}],  # ignored, so it excludes nothing
    )
    points = points_of(theirs, BASE)
    assert [point.name for point in points] == ["tp1-name=vllm", "tp2-name=vllm"]
    assert points[0].overrides == ["~trainer.seed", "trainer.max_ckpt_to_keep=2", f"{TP}=1", *points[0].overrides[3:]]
    with pytest.raises(ConfigError, match="ulysses"):
        points_of(dataclasses.replace(theirs, grid={"actor_rollout_ref.actor.ulysses_sequence_parallel_size": [2]}), {})


def test_keys_follow_what_runs_and_nothing_else():
    """Another base or override is another run; another order, name or grid is not.

    Would not catch a file that a configuration names and that has changed.
    """

    def keys(base: dict, **changes) -> dict[str, str]:
        return {point.name: point.key for point in points_of(dataclasses.replace(ABLATION, **changes), base)}

    first = keys(BASE)
    assert first == keys(dict(reversed(BASE.items())))
    assert keys(BASE, grid={ROLLOUT_TP: [2, 1], TP: [2, 1]}, points=[])["rollout_tp1-tp2"] == first["tp2-rollout_tp1"]
    assert not set(first.values()) & set(keys(BASE | {"trainer.device": "cuda"}).values())
    assert not set(first.values()) & set(keys(BASE, overrides={"trainer.seed": 8}).values())
    assert first == keys(BASE | {"trainer.seed": 2})  # an override stands above it
    assert len(set(first.values())) == len(first)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**9), 10**9),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=12).filter(lambda text: "${" not in text),
    st.lists(st.integers(), max_size=3),
)


@given(VALUES)
def test_every_value_survives_the_command_line(value):
    """As the loader reads overrides. Would not catch an interpolation, which is to be resolved."""
    (override,) = Point("x", "y", {"a": value}, {}).overrides
    text = override.partition("=")[2]
    found = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)["value"]
    assert found == value and type(found) is type(value)


def test_names_are_short_and_apart():
    """GroupSizes sizes have their own; others as many parts as they need."""
    keys = {TP, PACKED, "critic.use_dynamic_bsz", "trainer.seed"}
    short = short_names(keys)
    assert short == {
        TP: "tp",
        PACKED: "actor.use_dynamic_bsz",
        "critic.use_dynamic_bsz": "critic.use_dynamic_bsz",
        "trainer.seed": "seed",
    }
    assert name_of({TP: 2, "trainer.seed": 1, PACKED: True}, short) == "tp2-seed=1-actor.use_dynamic_bsz=true"
    assert name_of({"trainer.seed": "a/b c"}, short) == "seed=a_b_c"
    assert name_of({}, short) == "base"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"grid": {}, "points": []}, "has no point"),
        ({"points": [{"name": "tp2-rollout_tp1", PP: 2}]}, "same name, tp2-rollout_tp1"),
        ({"points": [{"name": "a/b", PP: 2}]}, "'a/b'"),
        ({"points": [{"name": "..", PP: 2}]}, r"'\.\.'"),
        ({"points": [{"name": "tp2-rollout_tp1-round2", PP: 2}], "repeats": 2}, "a further round of tp2-rollout_tp1 "),
        ({"baseline": "tp2-rollout_tp3"}, "did you mean: tp2-rollout_tp"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(changes, says):
    """Would not catch names that differ in case alone, on a file system that does not tell them apart."""
    with pytest.raises(ConfigError, match=says):
        points_of(dataclasses.replace(ABLATION, **changes), BASE)


POINT = Point("a", "key", {}, {})
STEP = {"timing_s/step": 2.5, "critic/score/mean": 0.5}


@pytest.mark.parametrize(
    ("record", "runs", "runs_with_retry"),
    [
        (None, True, True),
        (Record("a", "key", TrialOutcome.FINISHED), False, False),
        (Record("a", "key", TrialOutcome.INTERRUPTED), True, True),
        (Record("a", "key", TrialOutcome.CRASHED), False, True),
        (Record("a", "key", TrialOutcome.OUT_OF_MEMORY), False, True),
        (Record("a", "key", TrialOutcome.TIMED_OUT), False, True),
        (Record("a", "key", TrialOutcome.INVALID), False, True),
        (Record("a", "other", TrialOutcome.FINISHED), True, True),
    ],
)
def test_what_runs_again(record, runs, runs_with_retry):
    """Finished never, interrupted always, failed on demand, and what was recorded with another configuration always."""
    assert must_run(record, POINT, retry_failed=False) is runs
    assert must_run(record, POINT, retry_failed=True) is runs_with_retry


def test_records_survive_the_file(tmp_path):
    """A number that is none becomes null. Would not catch a record of a later version that has the same fields."""
    record = Record("a", "key", TrialOutcome.FINISHED, exit_code=0, steps={1: dict(STEP)}, received_bytes=[3, 4])
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]
    (tmp_path / "record.json").write_text('{"outcome": "finished", "steps": {}, "else": 1}')
    assert read_record(tmp_path) is None
    (tmp_path / "record.json").write_text('{"outcome": "fini')
    assert read_record(tmp_path) is None
    whole = {"name": "a", "key": "key", "outcome": "finished", "steps": {"1": STEP}}
    (tmp_path / "record.json").write_text(json.dumps(whole | {"steps": {"1": {**STEP, "perf/throughput": None}}}))
    assert read_record(tmp_path) == Record("a", "key", TrialOutcome.FINISHED, steps={1: STEP})
    no_episode_was_played = {"timing_s/step": 1.0}
    (tmp_path / "record.json").write_text(json.dumps(whole | {"steps": {"1": STEP, "2": no_episode_was_played}}))
    assert result_of(read_record(tmp_path), num_ranks=1, warmup_steps=0).scores == (0.5,)
    for wrong in (
        {"steps": {}},
        {"steps": {"1": {"timing_s/step": 1.0}}},
        {"steps": {"1": {**STEP, "timing_s/step": 0}}},
        {"steps": {"1": {**STEP, "perf/throughput": math.nan}}},
        {"steps": {"1": {**STEP, "perf/throughput": 10**400}}},
        {"steps": {"1": {**STEP, "perf/throughput": "x"}}},
        {"received_bytes": "x"},
        {"bound_bytes": [1.5]},
        {"tail": 5},
        {"tail": [1]},
        {"reason": [1]},
        {"outcome": "crashed", "seconds": "x"},
    ):
        (tmp_path / "record.json").write_text(json.dumps(whole | wrong))
        assert read_record(tmp_path) is None, wrong
    (tmp_path / "record.json").write_text("[" * 100_000)
    assert read_record(tmp_path) is None and read_record(tmp_path / "absent") is None
