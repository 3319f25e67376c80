"""A reward function of groups: real processes, a tokenizer whose token i is the i-th of "_ab" and whose token 0 is
special.
"""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from megatron_rl.errors import ConfigError, RewardError
from megatron_rl.records import ragged, single_turn
from megatron_rl.scoring.function import RewardSource
from megatron_rl.scoring.group_function import GroupRewardSource
from megatron_rl.scoring.group_reward import GroupReward
from megatron_rl.scoring.reward_processes import RewardHere, RewardProcesses
from megatron_rl.scoring.rule import Ended

pytestmark = pytest.mark.timeout(60)

RANK = """
def compute_group_scores(rows, scale=1):
    with open(__file__ + ".calls", "a") as calls:
        calls.write("|".join(row["solution_str"] for row in rows) + "\\n")
    lengths = [len(row["solution_str"]) for row in rows]
    return [{"score": scale * sorted(lengths).index(length), "of": len(rows)} for length in lengths]
"""
OBEDIENT = """
import math, os, time
def compute_group_scores(rows):
    return eval(rows[0]["ground_truth"])
"""
NOT_ASKED = -1.0
"""`failed_score` of these tests."""


@pytest.fixture
def tokenizer():
    backend = Tokenizer(models.WordLevel({"_": 0, "a": 1, "b": 2}, unk_token="_"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="_")


@pytest.fixture
def source(tmp_path):
    def write(text, **kwargs):
        (tmp_path / "mine.py").write_text(text)
        return GroupRewardSource(RewardSource(str(tmp_path / "mine.py"), "compute_group_scores", kwargs))

    return write


def batch(uid, responses, truths=None, **columns):
    """Rows of the groups `uid`, with these response ids."""
    count, sample = len(uid), [uid[:row].count(number) for row, number in enumerate(uid)]
    whole = [torch.tensor([1, *response]) for response in responses]
    rows = single_turn(ragged(whole), torch.tensor([len(response) for response in responses]))
    rows.add(
        index=torch.tensor([10 + number for number in uid]),
        sample=torch.tensor(sample),
        data_source=["unit"] * count,
        ground_truth=truths or ["x"] * count,
        extra_info=[{"row": row} for row in range(count)],
        uid=torch.tensor(uid),
    )
    rows.add(truncated=torch.tensor([0 not in response for response in responses]), **columns)
    return rows


def test_rows_and_scores_of_interleaved_groups(source, tokenizer, tmp_path):
    """By hand: ranks by length within a group; every entry of a row. Would not catch a row of another batch."""
    told = """
seen = []
def compute_group_scores(rows):
    seen.append([dict(row) for row in rows])
    rows.sort(key=id)
    return [len(row["solution_str"]) for row in seen[-1]]
"""
    here = RewardHere(source(told))
    rows = batch([4, 3, 4, 3, 4], [[1, 1, 0], [2, 0], [1, 2], [], [2, 0]])
    scored = GroupReward(here, tokenizer)(rows)
    assert scored.scores.tolist() == [2, 1, 2, 0, 1]
    seen = here._call.args[0].func.__globals__["seen"]
    assert [[row["solution_str"] for row in group] for group in seen] == [["aa", "ab", "b"], ["b", ""]]
    first = {"data_source": "unit", "solution_str": "ab", "ground_truth": "x", "extra_info": {"row": 2}}
    assert seen[0][1] == first | {"index": 14, "sample": 1, "num_tokens": 2, "truncated": True}
    with RewardProcesses(source(RANK, scale=2), 2, 10.0, True) as processes:
        ranked = GroupReward(processes, tokenizer)(rows)
    assert ranked.scores.tolist() == [2, 2, 2, 0, 0] and ranked.metrics()["reward/of/mean"] == 13 / 5
    assert sorted((tmp_path / "mine.py.calls").read_text().split("\n")) == ["", "aa|ab|b", "b|"]


BAD = {
    "1 / 0": ("raised", "ZeroDivisionError"),
    "[0.5]": ("no_score", "returned 1 values, [0.5]; it must return a list with a score for each of the 2 rows"),
    "[1, 2, 3]": ("no_score", "returned 3 values"),
    "0.5": ("no_score", "an object that is no list, 0.5"),
    "{1: 2, 3: 4}": ("no_score", "an object that is no list"),
    "os._exit(3)": ("crashed", "exited with code 3"),
    "time.sleep(1000)": ("timed_out", "reward_model.timeout_s=1"),
    "['a' * 100_000] * 2 and [{'score': 1.0, str(n): 'a' * 100_000} for n in range(2)] * 90": ("no_score", "180 val"),
}


def test_every_failure_of_a_call_costs_one_group(source, tokenizer):
    """A bad group after each good one: all its responses fail alike. Would not catch a failure in the file."""
    truths = [truth for bad in BAD for truth in ("[1.0, 2.0]", bad)]
    uid = [group for group in range(len(truths)) for _ in range(2)]
    rows = batch(uid, [[1]] * len(uid), [truth for truth in truths for _ in range(2)])
    with RewardProcesses(source(OBEDIENT), 2, 1.0, True) as processes:
        scored = GroupReward(processes, tokenizer, NOT_ASKED)(rows)
    assert scored.scores.tolist() == [1.0, 2.0, NOT_ASKED, NOT_ASKED] * len(BAD)
    for number, (kind, reason) in enumerate(BAD.values()):
        for outcome in scored.outcomes[4 * number + 2 : 4 * number + 4]:
            assert outcome.failure == kind and reason in outcome.reason
    assert "prompt 11 of data source 'unit'" in scored.first_failure
    assert scored.metrics()["reward/raised"] == 2 and scored.metrics()["reward/failed_ratio"] == 0.5


def test_one_bad_score_costs_one_response(source, tokenizer):
    """In an `async` function, with a dict, NaN and text beside. Would not catch a class of float that is none."""
    text = """
async def compute_group_scores(rows):
    return ({"score": 1, "acc": 0.0, "pred": "b"}, float("nan"), "3", 4)
"""
    rows = batch([0] * 4, [[1]] * 4)
    with RewardProcesses(source(text), 1, 10.0, True) as processes:
        scored = [GroupReward(kind, tokenizer)(rows) for kind in (processes, RewardHere(source(text)))]
    for found in scored:
        assert [outcome.failure for outcome in found.outcomes] == ["", "no_score", "no_score", ""]
        assert found.scores.tolist() == [1, 0, 0, 4] and found.variables()["acc"] == [0, 0, 0, 4]
        assert found.predictions() == ["b", None, None, None]


def test_episodes_that_failed_are_in_no_group(source, tokenizer, tmp_path):
    """The others of the group are scored without them; all that were asked failing stops the run, and a batch of failed
    episodes asks nothing. Would not catch an episode that failed and is trained.
    """
    rows = batch([0, 0, 0, 1], [[1, 1], [], [1], []], failed=torch.tensor([False, True, False, True]))
    rows.add(environment_rewards=torch.tensor([0.25, 0.0, 0.5, 0.0]))
    scored = GroupReward(RewardHere(source(RANK)), tokenizer, NOT_ASKED)(rows)
    assert scored.scores.tolist() == [1, NOT_ASKED, 0, NOT_ASKED]
    assert [outcome.failure for outcome in scored.outcomes] == [""] * 4 and scored.first_failure is None
    assert scored.variables()["acc"] == [1, 0, 0, 0]
    assert (tmp_path / "mine.py.calls").read_text() == "aa|a\n"
    with pytest.raises(RewardError, match="none of 2 samples could be scored; .*KeyError"):
        GroupReward(RewardHere(source("def compute_group_scores(rows): return rows[0]['no']")), tokenizer)(rows)
    lost = batch([0, 0], [[], []], failed=torch.tensor([True, True]))
    assert GroupReward(RewardHere(source(RANK)), tokenizer, NOT_ASKED)(lost).scores.tolist() == [NOT_ASKED] * 2


def test_a_group_begins_as_its_last_response_ends(source, tokenizer, tmp_path):
    """Requests 6 to 11 are a batch of groups of 3, and 12 is of the next. Each group is called once; one with a failed
    episode, and one whose response changed, when the batch is complete. Would not catch a call that begins late.
    """
    rows = batch([0, 0, 0, 1, 1, 1], [[1], [1, 1], [1, 1, 1], [2], [2, 2], [2, 2, 2]])

    def ended(number, text):
        """Rows of two groups of 3 before each number."""
        first = number // 3 * 3
        task = {"data_source": "unit", "ground_truth": "x", "extra_info": {}, "index": 0, "sample": number - first}
        return Ended(number, task, text, range(first, first + 3), len(text), True)

    calls = tmp_path / "mine.py.calls"
    with RewardProcesses(source(RANK), 1, 10.0, True) as processes:
        reward = GroupReward(processes, tokenizer)
        for number, text in ((8, [1, 1, 1]), (6, [1]), (9, [2]), (7, [1, 1]), (12, [1]), (11, [2, 2, 2])):
            reward.begin(ended(number, text))
        assert processes.num_open == 1
        assert reward(rows, numbers=range(6, 12)).scores.tolist() == [0, 1, 2] * 2
        assert calls.read_text().split() == ["a|aa|aaa", "b|bb|bbb"]
        for number, text in ((13, [2]), (14, [2]), (15, [1]), (16, [1]), (17, [1])):
            reward.begin(ended(number, text))
        changed = batch([0, 0, 0, 1, 1, 1], [[1], [2], [2], [1], [1, 1], [1]])
        assert reward(changed, numbers=range(12, 18)).scores.tolist() == [0, 0, 0, 0, 2, 0]
    assert sorted(calls.read_text().split()[2:]) == ["a|aa|a", "a|a|a", "a|b|b"]


@pytest.mark.parametrize(
    ("text", "kwargs", "message"),
    [
        ("def compute_group_scores(): ...", {}, r"cannot be called as compute_group_scores\(rows\)"),
        ("def compute_group_scores(rows, judge): ...", {}, "missing a required argument: 'judge'"),
        ("def compute_group_scores(rows): ...", {"judge": 1}, "unexpected keyword argument 'judge'"),
        ("def compute_group_scores(rows): ...", {"rows": 1}, "multiple values for argument 'rows'"),
        ("def compute_score(rows): ...", {}, "no function 'compute_group_scores'"),
    ],
)
def test_bad_functions_are_explained(source, text, kwargs, message):
    """Would not catch a function that takes the rows and fails when called."""
    with pytest.raises(ConfigError, match=message):
        source(text, **kwargs).check({"unit"})
