"""Dynamic sampling, with a run and workers that only know scores."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config.schema import RunConfig
from megatron_rl.records import Generations, Prompts, Sequences, SequenceScores, non_tensor, ragged
from megatron_rl.reward.outcome import Outcome, Sample
from megatron_rl.reward.rule import Scored
from megatron_rl.run import Run
from megatron_rl.sampling import sample, start_rm_scores


def scored(scores: list[float]) -> Scored:
    """As the rules return it; each sample's solution is its score, to tell them apart."""
    samples = [Sample("a", str(score), "x", {}) for score in scores]
    return Scored(torch.tensor(scores), samples, [Outcome(score) for score in scores], None)


class Answers:
    """Workers whose answers are one token each, and remember the seeds they were asked with."""

    def __init__(self) -> None:
        self.salts: list[int] = []

    def enter_rollout(self):
        return SimpleNamespace(get=list)

    exit_rollout = enter_rollout

    def generate(self, prompts: Prompts, sampling: int):
        self.salts.append(sampling)
        answers = Generations(
            response_ids=ragged([torch.tensor([int(i)]) for i in prompts.index]),
            rollout_log_probs=ragged([torch.zeros(1)] * len(prompts)),
            truncated=torch.zeros(len(prompts), dtype=torch.bool),
            batch_size=prompts.batch_size,
        )
        return SimpleNamespace(get=lambda: answers)


class ScriptedRun:
    """Two prompts of two samples a batch; only prompts whose number is in `mixed` get scores that differ."""

    has_reward_model = False

    def __init__(self, mixed: set[int], most: int = 10) -> None:
        self.config, self.mixed, self.next, self.noted = RunConfig(), mixed, 0, None
        self.config.data.train_batch_size = 2
        self.config.algorithm.filter_groups.enable = True
        self.config.algorithm.filter_groups.max_num_gen_batches = most

    def phase(self, name: str):
        return contextlib.nullcontext()

    def next_prompts(self) -> Prompts:
        index = torch.tensor([self.next, self.next + 1])
        self.next += 2
        prompts = Prompts(
            index=index,
            sample=torch.zeros(2, dtype=torch.int64),
            prompt_ids=ragged([torch.tensor([1]), torch.tensor([2])]),
            data_source=non_tensor(["a", "a"]),
            ground_truth=non_tensor(["x", "y"]),
            extra_info=non_tensor([{}, {}]),
            batch_size=[2],
        )
        return prompts.repeat(2)

    def scored(self, prompts: Prompts, generations: Generations, rm_scores=None) -> Scored:
        rows = zip(prompts.index.tolist(), prompts.sample.tolist(), strict=True)
        return scored([float(index in self.mixed and s == 1) for index, s in rows])

    def sampling(self, salt: int) -> int:
        return salt

    def note_transition(self, reports: list) -> None:
        pass

    def abandon_step_if_late(self) -> None:
        pass

    def note_sampling(self, num_batches: int, share: float) -> None:
        self.noted = (num_batches, share)


@pytest.mark.parametrize(
    ("mixed", "most", "chosen", "noted"),
    [
        ({0, 1}, 10, [0, 1], (1, 1.0)),
        ({1, 4, 5}, 10, [1, 4], (3, 1.0)),
        ({1}, 2, [0, 1], (2, 0.5)),  # filled up
        (set(), 2, [0, 1], (2, 0.0)),
    ],
)
def test_batches_until_enough_prompts_differ(mixed, most, chosen, noted):
    """Whole groups, in order, their answers and scores with them. Would not catch a prompt that is drawn twice."""
    run, workers = ScriptedRun(mixed, most), Answers()
    prompts, generations, found = sample(run, workers, step=7)
    assert prompts.index.tolist() == [index for index in chosen for _ in range(2)]
    assert generations.response_ids.values().tolist() == prompts.index.tolist()
    expected = run.scored(prompts, generations)
    assert found.scores.tolist() == expected.scores.tolist()
    assert (found.samples, found.outcomes) == (expected.samples, expected.outcomes)
    assert len(prompts.uid.unique()) == 2 and run.noted == noted
    assert len(set(workers.salts)) == noted[0] and workers.salts[0] == 7


def test_without_filter_one_batch():
    """Scores are left to the loop. Would not catch a second transition."""
    run = ScriptedRun(set())
    run.config.algorithm.filter_groups.enable = False
    prompts, _, found = sample(run, Answers(), step=1)
    assert len(prompts) == 4 and found is None and run.noted is None


def test_scores_of_greedy_answers_reach_their_groups():
    """One answer per group, for all its samples; overlong ones are penalised. Would not catch a sampled baseline."""
    run = ScriptedRun(set())
    prompts = torch.cat([run.next_prompts(), run.next_prompts()])
    prompts.uid = torch.tensor([8, 8, 3, 3, 5, 5, 9, 9])
    one = prompts.one_per_group()
    assert one.uid.tolist() == [3, 5, 8, 9] and one.index.tolist() == [1, 2, 0, 3] and one.sample.tolist() == [0] * 4
    greedy = Answers().generate(one, 0).get()
    config = RunConfig()
    config.data.max_response_length = 1
    config.reward_model.overlong_buffer.enable, config.reward_model.overlong_buffer.len = True, 1
    shaped = SimpleNamespace(config=config, reward=lambda p, g, _: scored(g.response_ids.values().float().tolist()))
    shaped.scored = lambda p, g, rm_scores: Run.scored(shaped, p, g, rm_scores)
    assert Run.greedy_scores(shaped, prompts, greedy, None).tolist() == [-1.0, -1.0, 0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


class Judge(Answers):
    """Answers, and a reward model that gives each sequence of prompt 1 its row number, and others 0."""

    def compute_rm_scores(self, sequences: Sequences):
        assert sequences.response_lengths.tolist() == [1] * len(sequences)
        firsts = [row[0].item() for row in sequences.input_ids.unbind()]
        scores = [float(row) if first == 1 else 0.0 for row, first in enumerate(firsts)]
        return SimpleNamespace(get=lambda: SequenceScores(torch.tensor(scores), batch_size=[len(scores)]))


def test_groups_are_compared_by_rule_and_reward_model_together():
    """The rule gives all the same, the model differs in one prompt of two; the penalty and a greedy baseline see both.

    Would not catch a model that scores other tokens; `tests/dist/test_reward_model.py` does.
    """
    run, workers = ScriptedRun(set(), most=1), Judge()
    run.has_reward_model, run.rules = True, lambda p, g: scored([1.0] * len(p))
    run.config.reward_model.rule_weight, run.config.reward_model.weight = 2.0, 0.5
    run.reward = lambda p, g, rm: Run.reward(run, p, g, rm)
    run.scored = lambda p, g, rm: Run.scored(run, p, g, rm)
    prompts, _, found = sample(run, workers, step=1)
    assert run.noted == (1, 0.5)
    assert prompts.index.tolist() == [0, 0, 1, 1] and found.scores.tolist() == [2.0, 2.5, 2.0, 2.0]
    assert found.metrics()["reward/rm_score/mean"] == 0.25 and found.metrics()["reward/rule_score/mean"] == 1

    run.config.data.max_response_length = 1
    run.config.reward_model.overlong_buffer.enable, run.config.reward_model.overlong_buffer.len = True, 1
    questions = prompts.one_per_group()
    greedy = workers.generate(questions, 0).get()
    rm_scores = start_rm_scores(run, workers, questions, greedy)
    assert Run.greedy_scores(run, prompts, greedy, rm_scores).tolist() == [1.0] * 4
