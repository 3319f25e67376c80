"""Rule rewards, with a tokenizer whose token i is the i-th of "_ab" and whose token 0 is special."""

import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from megatron_rl.errors import ConfigError, RewardError
from megatron_rl.records import ragged, single_turn
from megatron_rl.scoring.function import RewardSource, load_reward_function
from megatron_rl.scoring.outcome import OWN_NAMES, score_sample
from megatron_rl.scoring.rule import RuleReward
from megatron_rl.scoring.scored_answers import ModelScores, combine


@pytest.fixture
def tokenizer():
    backend = Tokenizer(models.WordLevel({"_": 0, "a": 1, "b": 2}, unk_token="_"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="_")


@pytest.fixture
def write(tmp_path):
    def write_file(text):
        path = tmp_path / "my_reward.py"
        path.write_text(text)
        return str(path)

    return write_file


class InProcess:
    """Stands in for the reward processes; remembers what the function was told."""

    def __init__(self, function):
        self.function, self.seen = function, []

    def score(self, samples, numbers=()):
        self.seen += samples
        return [score_sample(self.function, sample) for sample in samples]


def batch(*responses):
    """Prompts 10, 11, ... with the given response ids, ground truth "ab" and extra_info {"row": i}."""
    count = len(responses)
    rows = [torch.tensor(response, dtype=torch.int64) for response in responses]
    whole = [torch.cat([torch.tensor([1]), row]) for row in rows]
    answered = single_turn(ragged(whole), torch.tensor([len(row) for row in rows]))
    answered.add(
        index=torch.arange(10, 10 + count),
        data_source=["unit"] * count,
        ground_truth=["ab"] * count,
        extra_info=[{"row": row} for row in range(count)],
    )
    return answered


def exact(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)


def test_scores_decoded_answers_in_order(tokenizer):
    """Ragged answers, EOS removed, keywords passed on. Would not catch a tokenizer that tidies spaces on decoding."""
    processes = InProcess(exact)
    scored = RuleReward(processes, tokenizer)(batch([1, 2, 0], [2], [1, 2]))
    assert processes.seen == [("unit", "ab", "ab", {"row": 0}), ("unit", "b", "ab", {"row": 1}), processes.seen[2]]
    assert scored.scores.tolist() == [1.0, 0.0, 1.0] and scored.scores.dtype == torch.float32
    assert scored.first_failure is None and scored.metrics()["reward/failed_ratio"] == 0.0


def test_empty_answers_are_scored_as_empty_text(tokenizer):
    """An end token alone, and no token at all. Would not catch a loss that cannot take a row without tokens."""
    processes = InProcess(lambda **row: len(row["solution_str"]))
    assert RuleReward(processes, tokenizer)(batch([0], [1], [])).scores.tolist() == [0.0, 1.0, 0.0]


def test_accepts_numbers_and_dicts(tokenizer):
    """int, bool and {"score": ...}; other numbers and texts are kept. Would not catch a number of another library."""
    results = iter([2, True, {"score": 0.5, "acc": True, "pred": "x", "bad": float("nan"), "list": [1]}])
    scored = RuleReward(InProcess(lambda **_: next(results)), tokenizer)(batch([1], [1], [1]))
    assert scored.scores.tolist() == [2.0, 1.0, 0.5]
    assert scored.outcomes[2].extras == {"acc": 1.0, "pred": "x"}
    assert scored.metrics()["reward/acc/mean"] == 1.0


@pytest.mark.parametrize("result", [None, "1.0", {"acc": 1.0}, float("nan"), float("inf"), [1.0], 1e39, {}])
def test_what_is_not_a_score_gets_the_configured_one(tokenizer, result):
    """Among good samples it is counted. Would not catch a subclass of float that is none."""
    results = iter([1.0, result])
    scored = RuleReward(InProcess(lambda **_: next(results)), tokenizer, failed_score=-2.0)(batch([1], [1, 2]))
    assert scored.scores.tolist() == [1.0, -2.0]
    metrics = scored.metrics()
    assert (metrics["reward/failed_ratio"], metrics["reward/no_score"], metrics["reward/raised"]) == (0.5, 1.0, 0.0)
    assert f"returned {result!r};" in scored.first_failure
    assert "prompt 11 of data source 'unit', response 'ab'" in scored.first_failure


def test_all_samples_failing_stops_the_run_unless_allowed(tokenizer):
    """The first sample is named, its long answer cut. Would not catch one good sample in a thousand."""

    def score(solution_str, **_):
        raise ZeroDivisionError("no rule")

    rows = batch([1] * 300, [1])
    with pytest.raises(RewardError, match="none of 2 .*ZeroDivisionError: no rule.*prompt 10 of") as error:
        RuleReward(InProcess(score), tokenizer)(rows)
    assert "a...a" in str(error.value) and len(str(error.value)) < 500
    allowed = RuleReward(InProcess(score), tokenizer, failed_score=0.25, stop_if_all_failed=False)(rows)
    assert allowed.scores.tolist() == [0.25, 0.25] and allowed.metrics()["reward/failed_ratio"] == 1.0


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("return int(solution_str)", r"base 10: 'ab' \(my_reward.py, line 2: return int\(solution_str\)\)"),
        ("return json.loads(solution_str)", r"\(my_reward.py, line 2: return json.loads\(solution_str\)\)"),
        (
            "return deep(solution_str)",
            r"TypeError: deep \(my_reward.py, line 4: def deep\(text\): raise TypeError\('deep'\)\)",
        ),
    ],
)
def test_the_line_of_the_users_file_is_shown(write, tokenizer, body, line):
    """Where it raised, or where it called a library that did. Would not catch a file that changes during the run."""
    path = write(
        f"def compute_score(solution_str, **_):\n    {body}\nimport json\ndef deep(text): raise TypeError('deep')\n"
    )
    function = load_reward_function(RewardSource(path, "compute_score"))
    with pytest.raises(RewardError) as error:
        RuleReward(InProcess(function), tokenizer)(batch([1, 2]))
    assert re.search(line, str(error.value))


def test_variables_of_validation(tokenizer):
    """A failed sample is not right and has no other number. Would not catch a metric that forgets None."""
    results = iter([{"score": 0.5, "acc": 1, "steps": 3, "pred": "a"}, None, 0.25])
    scored = RuleReward(InProcess(lambda **_: next(results)), tokenizer, failed_score=-1.0)(batch([1], [1], [1]))
    expected = {"acc": [1.0, 0.0, 0.25], "reward": [0.5, -1.0, 0.25], "steps": [3.0, None, None]}
    assert scored.variables() == expected
    assert scored.predictions() == ["a", None, None]
    plain = RuleReward(InProcess(exact), tokenizer)(batch([1, 2], [1]))
    assert plain.variables() == {"acc": [1.0, 0.0], "reward": [1.0, 0.0]} and plain.predictions() == [None, None]


def test_table_has_verls_columns(tokenizer):
    """Would not catch questions in another order than the answers."""
    results = iter([{"score": 0.5, "pred": "a"}, None])
    scored = RuleReward(InProcess(lambda **_: next(results)), tokenizer)(batch([1], [2]))
    first, second = scored.table(["1+1=", "1+2="], step=7)
    assert first == {
        "input": "1+1=",
        "output": "a",
        "gts": "ab",
        "score": 0.5,
        "step": 7,
        "data_source": "unit",
        "failure": "",
        "pred": "a",
    }
    assert (second["input"], second["failure"]) == ("1+2=", "no_score")


def test_entries_under_the_programs_names_are_kept_apart(tokenizer):
    """Neither metrics, validation nor tables lose a value to the function's. Would not catch a name added later."""
    told = {"score": 1.0, "reward": 5.0, "step": 99, "rm_score": 7.0, "failure": "none", "rule/step": 3}
    scored = RuleReward(InProcess(lambda **_: told), tokenizer)(batch([1]))
    scored = combine(scored, [ModelScores("reward_model", torch.tensor([2.0]), 1.0)], 1.0)
    assert scored.variables()["reward"] == [3.0] and scored.variables()["rm_score"] == [2.0]
    apart = {"rule/reward": 5.0, "rule/step": 99.0, "rule/rm_score": 7.0, "rule/rule/step": 3.0}
    assert {name: values[0] for name, values in scored.variables().items() if name.startswith("rule/")} == apart
    assert scored.metrics()["reward/rule/step/mean"] == 99.0
    (row,) = scored.table(["1+1="], step=7)
    assert (row["step"], row["failure"], row["rule/failure"], row["rm_score"]) == (7, "", "none", 2.0)


def test_every_column_of_a_table_is_a_reserved_name(tokenizer):
    """Would not catch a name that only another room writes."""
    scored = RuleReward(InProcess(exact), tokenizer)(batch([1]))
    scored = combine(scored, [ModelScores("reward_model", torch.tensor([2.0]), 1.0, torch.tensor([False]))], 1.0)
    columns = scored.table(["1+1="], step=7)[0].keys()
    assert columns | scored.variables().keys() - {"acc"} == OWN_NAMES


def test_loads_a_function_from_a_file(write):
    """A dataclass in the file works too. Would not catch files that import their neighbours."""
    path = write(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Score:\n    value: float\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1):\n"
        "    return scale * Score(0.25).value\n"
    )
    assert load_reward_function(RewardSource(path, "compute_score"))("unit", "a", "b") == 0.25
    assert load_reward_function(RewardSource(path, "compute_score", {"scale": 2}))("unit", "a", "b") == 0.5
    with pytest.raises(ConfigError, match="reward_kwargs={'scales': 2}: got an unexpected keyword argument 'scales'"):
        load_reward_function(RewardSource(path, "compute_score", {"scales": 2}))


def test_the_first_prints_are_shown_and_the_rest_is_in_a_file(write, tmp_path, capsys):
    """Of 7 prints 5, and where the file cannot be written all; what goes to stderr stays there. Would not catch what a
    library prints.
    """
    path = write(
        "import sys\ndef compute_score(solution_str, **_):\n    print('saw', solution_str)\n"
        "    print('!', file=sys.stderr)\n    return 1.0\n"
    )
    rest = tmp_path / "rest.txt"
    for file, shown in ((rest, 5), (tmp_path / "missing/rest.txt", 7)):
        function = load_reward_function(RewardSource(path, "compute_score", prints_file=str(file)))
        assert [function(solution_str=str(number)) for number in range(7)] == [1.0] * 7
        printed = capsys.readouterr()
        said = [f"the reward function prints more than 5 times; the rest goes to {rest}"] if shown == 5 else []
        assert printed.out.splitlines() == [*(f"saw {number}" for number in range(shown)), *said]
        assert printed.err == "!\n" * 7
    assert rest.read_text() == "saw 5\nsaw 6\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module_here", "fails to run: ModuleNotFoundError"),
        ("import sys; sys.exit(1)", "fails to run: SystemExit"),
        ("def compute_score(:", "fails to run: SyntaxError"),
        ("def compute_scores(): ...\ndef other(): ...", "no function 'compute_score' .*did you mean: compute_scores"),
        ("compute_score = 3", "no function 'compute_score' .*defines no function"),
        ("compute_score = type", "compute_score.* cannot be called with"),
        (
            "class Mute(Exception):\n    def __str__(self): raise self\nraise Mute()",
            "fails to run: Mute, which cannot be shown",
        ),
        ("def compute_score(answer, truth): ...", r"compute_score\(answer, truth\) cannot be called with"),
    ],
)
def test_bad_files_are_explained(write, text, message):
    """Would not catch a function that accepts the keywords and fails when called."""
    with pytest.raises(ConfigError, match=re.compile(message, re.DOTALL)):
        load_reward_function(RewardSource(write(text), "compute_score"))


def test_missing_file_names_its_neighbour(write):
    """Would not catch a file that is there and may not be read."""
    path = write("")
    with pytest.raises(
        ConfigError, match=r"custom_reward_function\.path=.*reword\.py must be .*did you mean.*my_reward\.py"
    ):
        load_reward_function(RewardSource(path.replace("reward.py", "reword.py"), "compute_score"))
