"""The rules that need no file."""

import pytest

from megatron_rl.config.declarations import REWARDS
from megatron_rl.errors import ConfigError
from megatron_rl.scoring import function as reward_functions
from megatron_rl.scoring.built_in.exact_match import exact_match
from megatron_rl.scoring.built_in.math_answer import math_answer
from megatron_rl.scoring.function import RewardSource, load_reward_function


def test_the_rules_that_are_declared():
    """Would not catch a data source that two rules declare."""
    assert list(REWARDS) == ["compute_score", "exact_match", "math"]


def test_exact_match_ignores_blanks_at_the_ends():
    """Would not catch a ground truth that has to keep its blanks."""
    assert exact_match("x", " 42\n", "42") == {"score": 1.0, "acc": 1.0, "pred": "42"}
    assert exact_match("x", "042", "42")["score"] == 0.0
    assert exact_match("x", "42", 42)["score"] == 1.0
    assert exact_match("x", "", "42") == {"score": 0.0, "acc": 0.0, "pred": ""}


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        (r"so \boxed{42}", "42", 1.0),
        ("the total is 42.", "42", 1.0),
        ("#### 1,000", "1000", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{(x-1)(x+1)}", "x^2-1", 1.0),
        (r"first 42, no, \boxed{41}", "42", 0.0),
        (r"\boxed{12} is wrong, so the right answer is \boxed{34}", "34", 1.0),
        ("\\boxed{12}\n\n\\boxed{34}. It is 30 + 4", "34", 1.0),
        (r"\boxed{12}, no: \boxed{34}", "12", 0.0),
        ("it is 1042", "She has 1,000 and 42, so\n#### 1,042", 1.0),
        ("it is 42", "She has 42 and 1,000, so\n#### 1,042", 0.0),
        (r"\boxed{\frac{1}{2}}", r"It is half, so $\boxed{0.5}$ of them.", 1.0),
        ("", "42", 0.0),
        ("no number at all", "42", 0.0),
    ],
)
def test_math_answers(answer, truth, right):
    """Equal values in other forms. Would not catch an answer the library misreads in a way not listed here."""
    pytest.importorskip("math_verify")
    assert math_answer("openai/gsm8k", answer, truth)["score"] == right


def test_math_predictions_of_equal_numbers_are_equal():
    """They vote together. Would not catch expressions that are equal and printed differently."""
    pytest.importorskip("math_verify")
    assert math_answer("x", r"\boxed{42}", "7")["pred"] == math_answer("x", "it is 42", "7")["pred"] == "42"


def test_a_ground_truth_that_is_no_mathematics_is_the_datas_fault():
    """Would not catch one that is read as another expression than its author meant."""
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="ground truth ''"):
        math_answer("x", "42", "")


def test_data_sources_choose():
    """Would not catch a source that is judged by a wrong rule of two that agree here."""
    function = load_reward_function(RewardSource(None, "compute_score"))
    assert function("demo/addition", "042", "42")["score"] == 0.0
    RewardSource(None, "compute_score").check({"demo/addition"})
    with pytest.raises(ConfigError, match=r"'opnai/gsm8k' .*did you mean: openai/gsm8k.*exact_match or math"):
        RewardSource(None, "compute_score").check({"demo/addition", "opnai/gsm8k"})
    RewardSource(None, "exact_match").check({"anything"})


def test_missing_library_is_said_before_the_run(monkeypatch):
    """Only where math is asked for. Would not catch a library that is there and broken."""
    monkeypatch.setattr(reward_functions.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'math-verify\[antlr4_13_2\]'"):
        RewardSource(None, "compute_score").check({"openai/gsm8k"})
    RewardSource(None, "compute_score").check({"demo/addition"})
