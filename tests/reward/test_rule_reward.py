"""Rule rewards, with a tokenizer whose token i is the i-th of "_ab" and whose token 0 is special."""

import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from megatron_rl.errors import ConfigError, RewardError
from megatron_rl.records import Generations, Prompts, non_tensor, ragged
from megatron_rl.reward.rule import RuleReward, load_reward_function


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


def batch(*responses):
    """Prompts 10, 11, ... with the given response ids, ground truth "ab" and extra_info {"row": i}."""
    count = len(responses)
    rows = [torch.tensor(response) for response in responses]
    prompts = Prompts(
        index=torch.arange(10, 10 + count),
        sample=torch.zeros(count, dtype=torch.int64),
        prompt_ids=ragged([torch.tensor([1])] * count),
        data_source=non_tensor(["unit"] * count),
        ground_truth=non_tensor(["ab"] * count),
        extra_info=non_tensor([{"row": row} for row in range(count)]),
        batch_size=[count],
    )
    generations = Generations(
        response_ids=ragged(rows),
        rollout_log_probs=ragged([torch.zeros(len(row)) for row in rows]),
        truncated=torch.zeros(count, dtype=torch.bool),
        batch_size=[count],
    )
    return prompts, generations


def test_scores_decoded_answers_in_order(tokenizer):
    """Ragged answers, EOS removed, keywords passed on. Would not catch a tokenizer that tidies spaces on decoding."""
    seen = []

    def score(data_source, solution_str, ground_truth, extra_info=None):
        seen.append((data_source, solution_str, ground_truth, extra_info["row"]))
        return float(solution_str == ground_truth)

    scores = RuleReward(score, tokenizer)(*batch([1, 2, 0], [2], [1, 2]))
    assert seen == [("unit", "ab", "ab", 0), ("unit", "b", "ab", 1), ("unit", "ab", "ab", 2)]
    assert scores.tolist() == [1.0, 0.0, 1.0] and scores.dtype == torch.float32


def test_accepts_numbers_and_dicts(tokenizer):
    """int, bool and {"score": ...} count as numbers. Would not catch a lost extra entry of the dict: none is kept."""
    results = iter([2, True, {"score": 0.5, "acc": True}])
    assert RuleReward(lambda **_: next(results), tokenizer)(*batch([1], [1], [1])).tolist() == [2.0, 1.0, 0.5]


@pytest.mark.parametrize("result", [None, "1.0", {"acc": 1.0}, float("nan"), float("inf"), [1.0]])
def test_refuses_what_is_not_a_score(tokenizer, result):
    """Sample and result are named. Would not catch a finite number too large for float32."""
    with pytest.raises(RewardError, match=r"a finite number.*prompt 10 of data source 'unit', answer 'ab'") as error:
        RuleReward(lambda **_: result, tokenizer)(*batch([1, 2]))
    assert f"returned {result!r};" in str(error.value)


def test_exception_is_chained_and_sample_named(tokenizer):
    """The second sample fails; its long answer is cut. Would not catch a function that never returns."""

    def score(solution_str, **_):
        return 1 / (len(solution_str) - 300)

    with pytest.raises(RewardError, match="ZeroDivisionError: .*prompt 11 of") as error:
        RuleReward(score, tokenizer)(*batch([1], [1] * 300))
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert "a...a" in str(error.value) and len(str(error.value)) < 400


def test_loads_a_function_from_a_file(write):
    """A dataclass in the file works too. Would not catch files that import their neighbours."""
    path = write(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Score:\n    value: float\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return Score(0.25).value\n"
    )
    assert load_reward_function(path, "compute_score")("unit", "a", "b") == 0.25


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module_here", "fails to run: ModuleNotFoundError"),
        ("def compute_score(:", "fails to run: SyntaxError"),
        ("def compute_scores(): ...\ndef other(): ...", "no function 'compute_score' .*nearest .*'compute_scores'"),
        ("compute_score = 3", "no function 'compute_score' .*defines no function"),
        ("def compute_score(answer, truth): ...", r"compute_score\(answer, truth\) cannot be called with"),
    ],
)
def test_bad_files_are_explained(write, text, message):
    """Would not catch a function that accepts the keywords and fails when called."""
    with pytest.raises(ConfigError, match=re.compile(message, re.DOTALL)):
        load_reward_function(write(text), "compute_score")


def test_missing_file_names_its_neighbour(write):
    """Would not catch a file that is there and may not be read."""
    path = write("")
    with pytest.raises(ConfigError, match=r"no reward file at .*reword.py.*nearest .*my_reward\.py"):
        load_reward_function(path.replace("reward.py", "reword.py"), "compute_score")
