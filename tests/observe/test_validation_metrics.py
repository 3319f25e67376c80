"""verl's validation metrics, by hand and against draws of our own."""

import math
import random
from itertools import product

import pytest

from megatron_rl.observe.summary import write_sample_table
from megatron_rl.observe.validation_metrics import majority_metrics, prompt_metrics, subset_sizes, validation_metrics

NO_VOTES = [None] * 8


def test_one_answer_per_prompt():
    """Two sources; acc is core. Would not catch a source whose name holds a slash, as verl's do."""
    variables = {"acc": [1.0, 0.0, 1.0], "reward": [0.5, 0.0, 2.0]}
    assert validation_metrics(["a", "a", "b/c"], [0, 1, 2], variables, NO_VOTES) == {
        "val-core/a/acc/mean@1": 0.5,
        "val-core/b/c/acc/mean@1": 1.0,
        "val-aux/a/reward/mean@1": 0.25,
        "val-aux/b/c/reward/mean@1": 2.0,
    }


def test_names_of_several_answers():
    """The list of verl for n = 4 with votes. Would not catch a wrong value under a right name."""
    variables = {"acc": [1.0, 0.0, 0.0, 1.0], "reward": [1.0, 0.0, 0.0, 1.0]}
    metrics = validation_metrics(["a"] * 4, [0] * 4, variables, ["x", "y", "y", "x"])
    draws = [f"{kind}@4/{statistic}" for kind in ("best", "maj") for statistic in ("mean", "std")]
    core = {f"val-core/a/acc/{name}" for name in ["mean@4", *draws]}
    assert {name for name in metrics if name.startswith("val-core")} == core
    assert {"val-aux/a/acc/best@2/mean", "val-aux/a/acc/worst@4/mean", "val-aux/a/reward/mean@4"} < metrics.keys()
    assert len(metrics) == 2 * (2 + 2 * 3 * 2)


def test_reward_is_core_without_acc():
    """Would not catch a variable that only some sources have."""
    assert list(validation_metrics(["a"], [0], {"reward": [2.0]}, [None])) == ["val-core/a/reward/mean@1"]


def test_missing_values_are_left_out():
    """A prompt without any value does not count. Would not catch a source without any value."""
    metrics = validation_metrics(["a"] * 3, [0, 1, 2], {"reward": [1.0] * 3, "x": [4.0, None, 2.0]}, NO_VOTES)
    assert metrics["val-aux/a/x/mean@1"] == 3.0


@pytest.mark.parametrize(("n", "sizes"), [(1, []), (2, [2]), (3, [2, 3]), (4, [2, 4]), (9, [2, 4, 8, 9])])
def test_subset_sizes(n, sizes):
    """Would not catch a size above n in a longer list."""
    assert subset_sizes(n) == sizes


def test_best_and_worst_are_the_means_over_all_draws():
    """All 27 draws of 3 from 3, and all 9 of 2. Would not catch an error for many equal values."""
    values = [0.0, 1.0, 5.0]
    metrics = prompt_metrics(values, 3)
    for k in (2, 3):
        for kind, pick in (("best", max), ("worst", min)):
            picked = [pick(draw) for draw in product(values, repeat=k)]
            mean = sum(picked) / len(picked)
            assert metrics[f"{kind}@{k}/mean"] == pytest.approx(mean)
            spread = math.sqrt(sum((value - mean) ** 2 for value in picked) / len(picked))
            assert metrics[f"{kind}@{k}/std"] == pytest.approx(spread)
    assert (metrics["mean@3"], metrics["std@3"]) == (2.0, pytest.approx(math.sqrt(14 / 3)))


def test_majority_agrees_with_plain_votes():
    """20,000 votes with other draws, ties to the first drawn. Would not catch a bias below 0.05."""
    values, votes = [1.0, 0.0, 0.0, 1.0, 0.5], ["x", "y", "y", "x", "z"]
    rng, metrics = random.Random(0), majority_metrics(values, votes, 5)
    for k in (2, 4, 5):
        total = 0.0
        for _ in range(20_000):
            drawn = rng.choices(range(5), k=k)
            cast = [votes[row] for row in drawn]
            total += values[drawn[cast.index(max(cast, key=cast.count))]]
        assert metrics[f"maj@{k}/mean"] == pytest.approx(total / 20_000, abs=0.05)
    assert majority_metrics(values, votes, 5) == metrics
    assert majority_metrics([1.0, 1.0, 0.0], ["x", "x", "x"], 3)["maj@3/mean"] == pytest.approx(2 / 3, abs=0.05)


def test_sample_table(tmp_path):
    """One object per line, later tables in place of earlier. Would not catch a table torn by a kill."""
    folder = tmp_path / "tables" / "train"
    write_sample_table(folder, 3, [{"input": "old"}, {"input": "old"}])
    file = write_sample_table(
        folder,
        3,
        [
            {
                "input": "1+1=\n",
                "score": float("nan"),
                "gts": {
                    1,
                },
                "output": "\u00e4",
            }
        ],
    )
    assert file.read_text() == '{"input": "1+1=\\n", "score": null, "gts": "{1}", "output": "\u00e4"}\n'
    assert [path.name for path in folder.iterdir()] == ["3.jsonl"]
