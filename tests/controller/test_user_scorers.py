"""Scorers of the user's: loaded before ranks start, asked beside the run's own, their faults named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_rl.config.load import read_config
from megatron_rl.config.schema import RunConfig
from megatron_rl.controller.run_scorers import user_scorers
from megatron_rl.errors import ConfigError, RewardError
from megatron_rl.records import Batch, ragged, single_turn
from megatron_rl.scoring.batch_scorers import score
from megatron_rl.scoring.sampled_batch import SampledBatch

REPOSITORY = Path(__file__).parents[2]
LONG = """
from megatron_rl.columns import COLUMNS, Column
from megatron_rl.records import Batch

COLUMNS.declare(Column("length", "row", "float32", "Shorter", (), "tokens of the answer"))

class Shorter:
    def __init__(self, config):
        self.factor = config.data.max_response_length

    def start(self, batch):
        self.batch = batch
        batch.metrics["shorter/steps"] = float(batch.step)

    def take(self):
        length = self.batch.rows.num_sampled.float()
        return Batch(length=length, scores=self.batch.rows["scores"] - length / self.factor)
"""


class Ones:
    """Scores of 1, as rewards that come before the user's scorers."""

    def start(self, batch: SampledBatch) -> None:
        self.num_rows = len(batch.rows)

    def take(self) -> Batch:
        return Batch(scores=torch.ones(self.num_rows))


def configured(folder: Path, name: str, text: str) -> RunConfig:
    (folder / "own.py").write_text(text)
    config, _ = read_config(REPOSITORY / "configs/demo_cpu.yaml", [f"custom_scorers.{name}.path={folder / 'own.py'}"])
    config.data.max_response_length = 4
    return config


def batch() -> SampledBatch:
    """Answers of one and two tokens, in step 7."""
    rows = single_turn(ragged([torch.tensor([5, 1]), torch.tensor([5, 6, 3, 1])]), torch.tensor([1, 2]))
    rows.add(index=torch.arange(2), ground_truth=["x", "y"], uid=torch.arange(2))
    return SampledBatch(7, rows)


def test_columns_of_a_class_in_a_file(tmp_path: Path) -> None:
    """A column of its own, and scores in place of those that were there: 1 - n / 4 of n tokens.

    Would not catch a scorer that only fails with ranks beside it.
    """
    scorers = user_scorers(configured(tmp_path, "Shorter", LONG))
    assert not scorers[0].in_validation
    scored = batch()
    score([*scorers, Ones()], scored)
    assert scored.rows["length"].tolist() == [1.0, 2.0] and scored.rows["scores"].tolist() == [0.75, 0.5]
    assert scored.metrics == {"shorter/steps": 7.0}
    assert scored.prompts.ground_truth == ["x", "y"] and scored.prompts.raw_prompt is None
    assert [ids.tolist() for ids in scored.prompts.prompt_ids.unbind()] == [[5], [5, 6]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class Longer: pass", "must define the class Shorter; it defines Longer"),
        ("x = 1", "must define the class Shorter; it defines no class"),
        ("class Shorter:\n  def start(self, batch): ...", "must have the methods start, take; it has no take"),
        ("class Shorter:\n  def start(self): ...\n  def take(self): ...", "raised TypeError"),
    ],
)
def test_a_class_that_does_not_fit_is_refused(tmp_path: Path, text: str, said: str) -> None:
    """Before anything starts, with the key. Would not catch methods of other arguments."""
    with pytest.raises(ConfigError, match=rf"custom_scorers\.Shorter\.path.*{said}"):
        user_scorers(configured(tmp_path, "Shorter", text))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def take(self): raise OSError('no server')", "raised OSError: no server"),
        (
            "def take(self): return {'scores': 1}",
            r"must return a megatron_rl.records.Batch; it returned \{'scores': 1\}",
        ),
        (
            "def take(self): return Batch(scorez=1)",
            "raised ValueError: no column scorez is declared; did you mean: scores",
        ),
    ],
)
def test_faults_of_a_scorer_are_its_own(tmp_path: Path, body: str, said: str) -> None:
    """With its name. Would not catch one that never returns."""
    head = "from megatron_rl.records import Batch\n\nclass Faulty:\n  def __init__(self, config): ...\n"
    scorers = user_scorers(configured(tmp_path, "Faulty", f"{head}  def start(self, batch): ...\n  {body}\n"))
    with pytest.raises(RewardError, match=rf"the scorer Faulty of .*own\.py {said}"):
        score(scorers, batch())
