"""Prompts that a class of the user's draws: in order, ahead of training, after a resume, and where it is wrong."""

from __future__ import annotations

import json

import pytest

from megatron_rl.config.schema import PromptSamplerConfig
from megatron_rl.data.prompt_mixture import MixtureCursor, PromptFile
from megatron_rl.data.prompt_sampler import PromptSampler
from megatron_rl.errors import ConfigError, RewardError

HARDEST = """
class PromptSampler:
    def __init__(self, rows, batch_size, seed, first=0):
        self.scores, self.batch_size = [float(row["index"] != first) for row in rows], batch_size
    def next_indices(self):
        return sorted(range(len(self.scores)), key=self.scores.__getitem__)[: self.batch_size]
    def update(self, indices, scores):
        for index, score in zip(indices, scores):
            self.scores[index] += score
    def state_dict(self):
        return {"scores": self.scores}
    def load_state_dict(self, state):
        self.scores = state["scores"]
"""


class Prompts:
    """Four usable prompts, with the numbers 10, 12, 14 and 16 of their rows."""

    files = (PromptFile("a.parquet", 4, {"tokens": "x"}),)

    @property
    def rows(self) -> list[dict]:
        return [{"index": 10 + 2 * row} for row in range(4)]

    def __len__(self) -> int:
        return 4


def sampler(tmp_path, text: str = HARDEST, data=None, **kwargs) -> PromptSampler:
    (tmp_path / "mine.py").write_text(text)
    config = PromptSamplerConfig(str(tmp_path / "mine.py"), kwargs=kwargs)
    return PromptSampler(config, data or Prompts(), 2, 1)


def test_scores_choose_the_next_prompts(tmp_path) -> None:
    """The two with the lowest sums; rows are known by their numbers. Would not catch a class that forgets."""
    cursor = sampler(tmp_path, first=14)
    ahead = cursor.ahead()
    assert (ahead.next_indices(), cursor.next_indices()) == ([2, 0], [2, 0])
    cursor.update([14, 10], [5.0, 0.5])
    assert (ahead.next_indices(), cursor.next_indices()) == ([1, 3], [1, 3])
    assert cursor.next_indices() == [1, 3]  # without one ahead


def test_batches_that_are_begun_outlive_a_checkpoint(tmp_path) -> None:
    """Two are drawn ahead, then scores come; a new process trains those two, and goes on with the scores. Would not
    catch a state that is not JSON, which the next test does.
    """
    cursor = sampler(tmp_path)
    ahead = cursor.ahead()
    drawn = [ahead.next_indices() for _ in range(3)]
    assert cursor.next_indices() == drawn[0]
    cursor.update([10, 12], [3.0, 1.0])
    state = json.loads(json.dumps(cursor.state_dict()))
    after = sampler(tmp_path)
    after.load_state_dict(state)
    again = after.ahead()
    assert [again.next_indices() for _ in range(3)] == [*drawn[1:], [2, 3]]
    assert [after.next_indices() for _ in range(3)] == [*drawn[1:], [2, 3]]


def changed(old: str, new: str) -> str:
    assert old in HARDEST
    return HARDEST.replace(old, new)


def test_what_is_wrong_is_said(tmp_path) -> None:
    """Numbers out of range, too few, an error, a state that is no JSON, other files, another order of a checkpoint, a
    class without a method. Would not catch a draw that never returns.
    """
    with pytest.raises(RewardError, match="next_indices of PromptSampler .* must return 2 positions from 0 to 3"):
        sampler(tmp_path, changed("return sorted", "return [7, 1] or sorted")).next_indices()
    with pytest.raises(RewardError, match=r"returned \[1\]"):
        sampler(tmp_path, changed("return sorted", "return [1] or sorted")).next_indices()
    with pytest.raises(RewardError, match="update of PromptSampler .* raised ZeroDivisionError"):
        sampler(tmp_path, changed("+= score", "/= 0")).update([10], [1.0])
    with pytest.raises(RewardError, match="state_dict of .* raised TypeError"):
        sampler(tmp_path, changed('{"scores": self.scores}', "{1j}")).state_dict()
    state = sampler(tmp_path).state_dict()
    other = Prompts()
    other.files = (PromptFile("a.parquet", 5, {"tokens": "x"}),)
    with pytest.raises(ConfigError, match="data.sampler.path and data.train_files must be as they were"):
        sampler(tmp_path, data=other).load_state_dict(state)
    with pytest.raises(ConfigError, match="data.sampler.path is not set now and was set when it was saved"):
        MixtureCursor(Prompts.files, None, 2, True, 1).load_state_dict(state)
    with pytest.raises(ConfigError, match="data.sampler.path and data.train_files must be as they were"):
        sampler(tmp_path).load_state_dict(MixtureCursor(Prompts.files, None, 2, True, 1).state_dict())
    with pytest.raises(ConfigError, match="it has no update"):
        sampler(tmp_path, changed("def update", "def updates"))
    with pytest.raises(ConfigError, match="PromptSampler raised TypeError"):
        sampler(tmp_path, typo=1)
