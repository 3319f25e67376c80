"""Numbers of an evaluation, by hand."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.observe.evaluation_table import (
    Estimate,
    counts_of,
    evaluation_table,
    mean_estimate,
    pass_at_k,
    share_estimate,
    table_lines,
)


def rows_of(source: str, index: int, accuracies: list[float], preds: list[str] | None = None) -> list[dict]:
    """Answers to one prompt."""
    rows = [
        {"data_source": source, "index": index, "sample": number, "score": 2 * accuracy, "acc": accuracy}
        for number, accuracy in enumerate(accuracies)
    ]
    return rows if preds is None else [row | {"pred": pred} for row, pred in zip(rows, preds, strict=True)]


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k(answers: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    choices = list(combinations(answers, k))
    assert math.isclose(pass_at_k(len(answers), sum(answers), k), sum(map(any, choices)) / len(choices), abs_tol=1e-12)


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(8, 2, 4) == pytest.approx(1 - 15 / 70)  # C(6, 4) = 15 of C(8, 4) = 70
    with pytest.raises(ValueError, match="pass@9 needs 9 responses, and the prompt has 8"):
        pass_at_k(8, 2, 9)


def test_wilsons_interval_by_hand() -> None:
    """8 of 10: (0.8 + 0.19207) / 1.38415 -+ 1.959964 / 1.38415 sqrt(0.016 + 0.0096036)."""
    assert share_estimate([1.0] * 8 + [0.0] * 2) == pytest.approx(Estimate(0.8, 0.49016, 0.94332), abs=1e-5)
    assert share_estimate([1.0] * 10) == pytest.approx(Estimate(1.0, 0.72247, 1.0), abs=1e-5)  # not of no width
    assert share_estimate([0.5] * 10) == pytest.approx(share_estimate([1.0, 0.0] * 5))  # no spread tells nothing


def test_shares_that_vary_less_count_as_more() -> None:
    """Numbers of 0.25 and 0.75 have a quarter of the variance of 0 and 1: ten of them count as forty."""
    assert share_estimate([0.25, 0.75] * 5) == pytest.approx(share_estimate([0.0, 1.0] * 20))


def test_means_have_normal_intervals() -> None:
    half = 1.959964 * math.sqrt(2.75 / 3) / 2  # squares of -0.75, -0.75, 0.25, 1.25
    assert mean_estimate([1.0, 1.0, 2.0, 3.0]) == pytest.approx(Estimate(1.75, 1.75 - half, 1.75 + half))
    assert mean_estimate([3.0]) == Estimate(3.0, math.nan, math.nan)


def test_a_table_by_hand() -> None:
    rows = [
        *rows_of("sums", 0, [1.0, 1.0, 0.0, 0.0], ["5", "5", "6", "7"]),
        *rows_of("sums", 1, [0.0, 0.0, 0.0, 0.0], ["1", "2", "3", "4"]),
        *rows_of("words", 7, [1.0, 1.0, 1.0, 1.0]),
    ]
    table = evaluation_table(rows)
    assert list(table) == ["sums", "words", "all"]
    sums = table["sums"]
    assert (sums["prompts"], sums["answers"]) == (2, 8)
    assert sums["reward"].value == pytest.approx(0.5) and sums["acc"].value == pytest.approx(0.25)
    values = {name: value.value for name, value in sums.items() if name.startswith("pass")}
    # of C(4, 2) = 6 pairs of the first prompt one has no right answer
    assert values == pytest.approx({"pass@1": 0.25, "pass@2": 5 / 12, "pass@4": 0.5})
    # of four answers drawn again and again "5" is the commonest in more than half of the draws
    assert 0.25 < sums["maj@4"].value < 0.5 and "maj@4" not in table["words"]
    assert table["all"]["acc"].value == pytest.approx((0.5 + 0 + 1) / 3) and table["all"]["answers"] == 12
    renamed = evaluation_table([row | {"data_source": row["data_source"].replace("words", "all")} for row in rows])
    assert (renamed["sums"], renamed["all"], renamed["*all*"]["answers"]) == (sums, table["words"], 12)


def test_without_a_rule_there_is_a_reward_alone() -> None:
    rows = [{"data_source": "a", "index": 0, "sample": 0, "score": -1.5}]
    assert evaluation_table(rows) == {"a": {"prompts": 1, "answers": 1, "reward": Estimate(-1.5, math.nan, math.nan)}}


def test_k_stops_at_the_fewest_answers_of_a_prompt() -> None:
    assert counts_of(1) == [1] and counts_of(6) == [1, 2, 4, 6]
    table = evaluation_table([*rows_of("a", 0, [1.0, 0.0, 0.0]), *rows_of("a", 1, [1.0, 0.0])])
    assert [name for name in table["a"] if "@" in name] == ["pass@1", "pass@2"]


def test_rows_of_the_printed_table() -> None:
    lines = table_lines(evaluation_table(rows_of("a", 0, [1.0, 1.0])))
    assert lines[0] == ("a: 1 prompts, 2 responses", "reward", "2.0000", "unknown")
    assert [line[1] for line in lines] == ["reward", "acc", "pass@1", "pass@2"]
