"""Violations as data: their text, what a program gets, and those that a key has only because it follows another."""

from __future__ import annotations

import json
import pickle

import pytest

from megatron_rl.config.keys import KEYS, follows
from megatron_rl.config.load import read_config
from megatron_rl.config.problems import raise_problems, refused, violations_of, without_echoes
from megatron_rl.errors import ConfigError, Violation


@pytest.mark.parametrize(
    ("violation", "text"),
    [
        (Violation({"a.b": 3}, "must be even", {"a.b": 2}), "a.b=3 must be even; try: 2"),
        (Violation({"a": None, "b": True}, "clash", {"b": False}), "a=null and b=true clash; try: b=false"),
        (
            Violation({"a": 0.1}, "is odd", {"c": 1e-5, "a": [1]}, "or not"),
            "a=0.1 is odd; try: c=1e-05 a=[1]; or not",
        ),
        (Violation({"k": "x"}, "is unknown", {"k": "y"}, file="f.json"), 'k="x" of f.json is unknown; try: "y"'),
        (Violation({"a": 4}, "must divide 6", {"a": 3}, subject="tp(4)"), "tp(4) must divide 6; try: a=3"),
        (Violation({}, "cannot be read"), "cannot be read"),
        (Violation({"a": 0.12345678}, "is long"), "a=0.12345678 is long"),
    ],
)
def test_text_is_made_from_the_data(violation, text):
    """Would not catch a rule that reads badly."""
    assert str(violation) == text
    assert json.loads(json.dumps(violation.as_json()))["text"] == text


def test_errors_carry_their_violations():
    """Through a pickle, too, as from a worker. Would not catch an error that is caught and told again as text."""
    one, other = Violation({"a": 1}, "is odd"), Violation({"b": 1}, "is odd")
    with pytest.raises(ConfigError, match="no: 2 problems\n  1. a=1 is odd\n  2. b=1 is odd") as raised:
        raise_problems("no", [one, other])
    assert pickle.loads(pickle.dumps(raised.value)).violations == (one, other)
    assert violations_of(refused(one)) == [one]
    assert violations_of(ConfigError("text alone")) == [Violation({}, "text alone")]
    raise_problems("yes", [])


def test_a_follower_joins_its_leader():
    """Either way round, over two steps, NaN too; not with another value. Would not catch a leader set by mistake."""
    chain = {"b": "a", "c": "b"}
    a, b, c = (Violation({key: 0}, "must be >= 1", {key: 1}) for key in "abc")
    joined = [Violation({"a": 0, "b": 0}, "must be >= 1", {"a": 1, "b": 1})]
    assert without_echoes([a, b], chain) == without_echoes([b, a], chain) == joined
    (all_three,) = without_echoes([a, b, c], chain)
    assert list(all_three.settings) == ["a", "b", "c"] and all_three.nearest == {"a": 1, "b": 1, "c": 1}
    other = Violation({"b": -1}, "must be >= 1", {"b": 1})
    assert without_echoes([a, other], chain) == [a, other]
    assert len(without_echoes([a, Violation({"d": 0}, "must be >= 1", {"d": 1})], chain)) == 2
    nan = [Violation({key: float("nan")}, "must be >= 1", {key: 1}) for key in "ab"]
    assert len(without_echoes(nan, chain)) == 1


def test_who_follows_whom():
    """Read off the schema. Would not catch a key that follows two."""
    assert follows()["critic.ppo_mini_batch_size"] == "actor_rollout_ref.actor.ppo_mini_batch_size"
    assert follows()["data.seed"] == "trainer.seed"
    assert set(follows()) | set(follows().values()) <= set(KEYS)


def test_reading_goes_on_after_a_misspelt_key(tmp_path):
    """It counts as not given, and a wrong type, too. Would not catch an offer that was not meant."""
    file = tmp_path / "run.yaml"
    file.write_text("data: {train_files: a, val_files: b}\nactor_rollout_ref: {model: {path: m}}\n")
    config, violations = read_config(file, ["trainer.nnode=3", "trainer.n_gpus_per_node=many"])
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (1, 8)
    assert [list(violation.settings) for violation in violations] == [["trainer.nnode"], ["trainer.n_gpus_per_node"]]
    config, violations = read_config(file, ["data.train_files=???"])
    assert config is None and "mandatory keys without a value: data.train_files" in str(violations[0])
