"""Dynamic sampling and scores, with a rollout that only knows prompts' numbers and a rule that only knows scores."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.config.load import read_config
from megatron_rl.config.roles import Placement
from megatron_rl.config.schema import RunConfig
from megatron_rl.dispatch import Future
from megatron_rl.errors import RewardError
from megatron_rl.observe.phase_clock import PhaseClock
from megatron_rl.records import Batch, Sampling, one_per_group, prompts_of, ragged, single_turn
from megatron_rl.rollout.slices import Drawn, Slice, SliceReport
from megatron_rl.sampling.pool_sampler import PoolSampler
from megatron_rl.sampling.response_history import ResponseHistory
from megatron_rl.sampling.sampler import Schedule, Sources
from megatron_rl.sampling.schedule_types import KeptGroups, ScheduleConfig
from megatron_rl.sampling.scheduler import Scheduler
from megatron_rl.scoring.batch_scorers import RewardScorer
from megatron_rl.scoring.outcome import Outcome, Sample
from megatron_rl.scoring.rewards import Rewards
from megatron_rl.scoring.scored_answers import ScoredAnswers
from megatron_rl.scoring.shaping import ModelShaping, RewardShaping
from megatron_rl.scoring.text_reader import TextReader
from megatron_rl.scoring.user_verdict import verdicts_of

REPOSITORY = Path(__file__).parents[2]


def scored(scores: list[float]) -> ScoredAnswers:
    """As the rules return it; each sample's solution is its score, to tell them apart."""
    samples = [Sample("a", str(score), "x", {}) for score in scores]
    return ScoredAnswers(torch.tensor(scores), samples, [Outcome(score) for score in scores], None)


class OneToken:
    """A rollout of one replica whose answers are their prompt's number. salts: those it got; named: how many earlier
    answers each request named.
    """

    def __init__(self) -> None:
        self.salts: list[int] = []
        self.named: list[list[int]] = []

    def enter(self) -> Future:
        return Future.done([])

    def exit(self) -> Future:
        return Future.done([])

    def advance(self, slices: dict[int, Slice]) -> Future:
        """Prompts of `Pairs` end in their number."""
        (order,) = slices.values()
        self.salts.append(order.starts[0].sampling.salt)
        self.named.append([len(start.earlier) for start in order.starts])
        drawn = {start.request: Drawn((start.token_ids[-1],), (0.0,), "stop") for start in order.starts}
        return Future.done([SliceReport(0, order.version, 1, drawn)])


class Pairs:
    """Training data of which every batch is two prompts; there are six."""

    def __len__(self) -> int:
        return 6

    def batch(self, index: torch.Tensor) -> Batch:
        return Batch(
            index=index,
            sample=torch.zeros(2, dtype=torch.int64),
            input_ids=ragged([torch.tensor([row + 1, int(number)]) for row, number in enumerate(index)]),
            data_source=["a", "a"],
            ground_truth=["x", "y"],
            extra_info=[{}, {}],
            uid=torch.arange(2),
        )


class Counting:
    """A cursor: prompts 0 and 1, then 2 and 3, and so on."""

    def __init__(self) -> None:
        self.next = 0

    def ahead(self) -> Counting:
        return copy.deepcopy(self)

    def next_indices(self) -> torch.Tensor:
        self.next += 2
        return torch.tensor([self.next - 2, self.next - 1])


def run_config(most: int = 10) -> RunConfig:
    """Two prompts of two samples a batch; answers of one token."""
    config, _ = read_config(REPOSITORY / "configs" / "demo_cpu.yaml", ["reward_models.strict.weight=-1"])
    config.data.train_batch_size, config.data.max_response_length = 2, 1
    config.actor_rollout_ref.rollout.n, config.actor_rollout_ref.rollout.temperature = 2, 1.0
    config.algorithm.filter_groups.enable = True
    config.algorithm.filter_groups.max_num_gen_batches = most
    return config


def streaming(config: RunConfig, rule, models=(), earlier=None, said=None) -> tuple[PoolSampler, OneToken]:
    """A stream of batches whose answers `rule` scores; models: (role, handle)."""
    told: list[str] = [] if said is None else said
    rollout, logger = OneToken(), SimpleNamespace(note_transition=lambda reports: None, warn=told.append)
    verdicts = verdicts_of(config, told.append, is_local=True)
    rewards = Rewards(config, rule, list(models), warn=print, clock=PhaseClock(lambda name: None))
    filters = config.algorithm.filter_groups
    filtered = KeptGroups(2, 2 * filters.max_num_gen_batches) if filters.enable else None
    rules = ScheduleConfig(4, num_steps_total=9, ahead=0, slice_steps=None, group_size=2, filtered=filtered)
    schedule = Schedule(rules, Scheduler(rules, 1), None, 1, rules.first_step - 1, None, None, earlier)
    sources = Sources(config, Pairs(), Counting(), RewardScorer(rewards), logger, verdicts=verdicts)
    return PoolSampler(schedule, sources, rollout), rollout


def mixed_rule(mixed: set[int]):
    """Only prompts whose number is in `mixed` get scores that differ."""

    def rule(answers: Batch, numbers=()) -> ScoredAnswers:
        rows = zip(answers["index"].tolist(), answers["sample"].tolist(), strict=True)
        return scored([float(index in mixed and sample == 1) for index, sample in rows])

    return rule


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
    rule = mixed_rule(mixed)
    rollouts, rollout = streaming(run_config(most), rule)
    batch = rollouts.next(step=1)
    assert batch.rows["index"].tolist() == [index for index in chosen for _ in range(2)]
    assert batch.rows.sampled_ids.values().tolist() == batch.rows["index"].tolist()
    expected = rule(batch.rows)
    assert batch.scored.scores.tolist() == expected.scores.tolist()
    assert (batch.scored.samples, batch.scored.outcomes) == (expected.samples, expected.outcomes)
    assert len(batch.rows["uid"].unique()) == 2
    share = 1 - 1 / noted[0]  # each batch of generation has as many tokens
    names = ("train/num_gen_batches", "train/differing_groups", "train/dropped_tokens")
    assert batch.metrics == dict(zip(names, (*noted, share), strict=True))
    assert len(set(rollout.salts)) == noted[0] and rollout.salts[0] == 1


def test_the_users_verdict_decides(tmp_path):
    """Kept are groups whose sum is 1 and whose prompt is odd, from rows with scores; each is judged once, and one
    verdict of four raises. Would not catch a group that is judged before its score is complete.
    """
    (tmp_path / "mine.py").write_text("""
def keep(rows):
    assert [row["num_tokens"] for row in rows] == [1, 1] and rows[0]["index"] != 2 and rows[0]["failure"] == ""
    return sum(row["score"] for row in rows) == 1 and rows[0]["index"] % 2 == 1
""")
    config, said = run_config(2), []
    config.algorithm.filter_groups.path, config.algorithm.filter_groups.name = str(tmp_path / "mine.py"), "keep"
    batch = streaming(config, mixed_rule({0, 1, 3}), said=said)[0].next(step=1)
    assert batch.rows["index"].tolist() == [1, 1, 3, 3] and batch.metrics["train/differing_groups"] == 1
    assert (batch.metrics["filter_groups/kept_ratio"], batch.metrics["filter_groups/raised"]) == (0.5, 1)
    assert len(said) == 1 and said[0].startswith("1 of 2 verdicts on groups failed; the first: the group filter raised")


def test_a_filter_that_keeps_nothing_is_said(tmp_path):
    """At the first step where batches are bounded, and an error where they are not and every prompt was generated.

    Would not catch a filter that keeps one group in a thousand steps.
    """
    said: list[str] = []
    rollouts, _ = streaming(run_config(2), mixed_rule({1}), said=said)
    first = rollouts.next(1)
    rollouts.load_weights(1)
    assert first.metrics["train/num_gen_batches"] == rollouts.next(2).metrics["train/num_gen_batches"] == 2
    share = "dynamic sampling keeps 1 of 4 groups (25.0%) in 2 batches"
    assert said == [f"{share}: groups that are not kept fill up the 2 of the step"]
    with pytest.raises(RewardError, match=r"keeps 0 of 6 groups \(0.0%\) in 3 batches.*max_num_gen_batches=3, or"):
        streaming(run_config(0), mixed_rule(set()))[0].next(step=1)


def test_answers_that_are_filtered_out_are_earlier_ones_too():
    """Two batches of a step name none of that step; the next step finds one answer of each prompt, kept or not.

    Would not catch other tokens in them: the store's own tests do.
    """
    rollouts, rollout = streaming(run_config(2), mixed_rule({1}), earlier=ResponseHistory(4, 1, 0))
    rollouts.next(step=1)
    rollouts.load_weights(1)
    rollouts._groups.prompts._ahead.next = 0
    rollouts.next(step=2)
    assert rollout.named == [[0] * 4] * 2 + [[1] * 4] * 2


def test_without_filter_one_batch():
    """Scores are left to the loop. Would not catch a second transition."""
    config = run_config()
    config.algorithm.filter_groups.enable = False
    rollouts, rollout = streaming(config, mixed_rule(set()))
    batch = rollouts.next(step=1)
    assert len(batch.rows) == 4 and batch.scored is None and batch.metrics == {} and len(rollout.salts) == 1


def test_scores_of_greedy_answers_reach_their_groups():
    """One answer per group, for all its samples; overlong ones are penalised. Would not catch a sampled baseline."""
    config = run_config()
    config.reward_model.overlong_buffer.enable, config.reward_model.overlong_buffer.len = True, 1
    rollouts, rollout = streaming(config, lambda g, numbers=(): scored(g.sampled_ids.values().float().tolist()))
    prompts = Batch.joined([rollouts.next_prompts(rollouts.cursor) for _ in range(2)])
    prompts.add(uid=torch.tensor([8, 8, 3, 3, 5, 5, 9, 9]))
    one = one_per_group(prompts)
    assert one["uid"].tolist() == [3, 5, 8, 9] and one["index"].tolist() == [1, 2, 0, 3]
    assert one["sample"].tolist() == [0] * 4
    greedy = rollouts.answer(one, rollouts.greedy())
    found = rollouts._groups.judge.scorer.rewards.greedy_scores(prompts, greedy, [])
    assert found.tolist() == [-1.0, -1.0, 0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


class Judge:
    """A reward model that gives each sequence whose prompt is `favourite` its row number, and others 0."""

    def __init__(self, favourite: int) -> None:
        self.favourite = favourite

    def scores(self, sequences: Batch) -> Future:
        assert sequences.num_sampled.tolist() == [1] * len(sequences)
        firsts = [row[0].item() for row in sequences["input_ids"].unbind()]
        scores = [float(row) if first == self.favourite else 0.0 for row, first in enumerate(firsts)]
        return Future.done(Batch(scores=torch.tensor(scores)))


def test_groups_are_compared_by_the_rule_and_two_reward_models_together():
    """The rule gives all the same, each model differs in one prompt of two; a penalty and a greedy baseline see all.

    By hand: rule 2 x 1; the first model 0.5 x row where the prompt is 1; the second -1 x row where it is 2. Would not
    catch a model that scores other tokens; `tests/parity` does.
    """
    config = run_config(most=1)
    config.reward_model.enable, config.reward_model.rule_weight, config.reward_model.weight = True, 2.0, 0.5
    specs = Placement.of(config).reward_models
    models = zip(specs, [Judge(1), Judge(2)], strict=True)
    rollouts, rollout = streaming(config, lambda g, numbers=(): scored([1.0] * len(g)), models)
    batch = rollouts.next(step=1)
    assert batch.metrics["train/num_gen_batches"] == 1 and batch.metrics["train/differing_groups"] == 1.0
    assert batch.rows["index"].tolist() == [0, 0, 1, 1] and batch.scored.scores.tolist() == [2.0, 2.5, 0.0, -1.0]
    metrics = batch.scored.metrics()
    assert metrics["reward/rm_score/mean"] == 0.25 and metrics["reward/rule_score/mean"] == 1
    assert metrics["reward/strict_score/mean"] == 1.25

    config.reward_model.overlong_buffer.enable, config.reward_model.overlong_buffer.len = True, 1
    greedy = rollouts.answer(one_per_group(prompts_of(batch.rows)), rollouts.greedy())
    rewards = rollouts._groups.judge.scorer.rewards
    pending = rewards.start(greedy)
    assert rewards.greedy_scores(batch.rows, greedy, pending).tolist() == [1.0, 1.0, 0.0, 0.0]

    config.algorithm.adv_estimator, config.algorithm.gdpo_reward_keys = "gdpo", ["score", "overlong_reward"]
    penalised = rewards.training_scores(greedy, rewards.start(greedy))
    assert penalised.scores.tolist() == [1.0, 0.0]
    components = rewards.components(penalised)
    assert components is not None and components.tolist() == [[1.0, -1.0], [1.0, -1.0]]


def test_a_rule_of_validation_is_not_asked_in_training():
    """There the score is the models' alone; held-out answers have the rule's accuracy beside the same reward.

    By hand: 0.5 x row where the prompt is 1. Would not catch a run that hands training prompts to validation.
    """
    config, asked = run_config(), []
    config.reward_model.enable, config.reward_model.weight, config.reward_models = True, 0.5, {}
    config.custom_reward_function.validation_only = True
    config.reward_model.rule_weight = 2.0  # not used

    class Rule:
        tokenizer = ModelFolder(REPOSITORY / "assets/demo/model").tokenizer

        def __call__(self, answers: Batch, numbers=()) -> ScoredAnswers:
            asked.append(len(answers))
            return scored([1.0, 0.0])

    models = zip(Placement.of(config).reward_models, [Judge(1)], strict=True)
    rewards = Rewards(config, Rule(), list(models), warn=print, clock=PhaseClock(lambda name: None))
    prompts = Pairs().batch(torch.tensor([0, 0]))
    prompts.add(input_ids=ragged([torch.tensor([1]), torch.tensor([1])]))
    answers = streaming(config, Rule())[0].answer(prompts, Sampling(1.0, 1.0, -1, 1, 0))
    trained = rewards.training_scores(answers, rewards.start(answers))
    assert trained.scores.tolist() == [0.0, 0.5] and asked == []
    assert trained.metrics() == {"reward/rm_score/mean": 0.5} and "acc" not in trained.variables()
    validated = rewards.task_scores(answers, rewards.start(answers)).variables()
    rewards.shaping = RewardShaping({"reward_model": ModelShaping("a", is_running=True)})
    answers.add(failed=torch.tensor([True, False]))
    rewards.training_scores(answers, rewards.start(answers))
    assert rewards.shaping.metrics()["reward/reward_model/running_mean"] == 1.0  # not the 0 of what failed
    assert asked == [2] and validated == {
        "acc": [1.0, 0.0],
        "reward": [0.0, 0.5],
        "rule_score": [1.0, 0.0],
        "rm_score": [0.0, 1.0],
    }


class Reading:
    """A reward model that gives each row its number of tokens."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def scores(self, sequences: Batch) -> Future:
        self.rows = [row.tolist() for row in sequences["input_ids"].unbind()]
        lengths = [float(len(row)) for row in self.rows]
        return Future.done(Batch(scores=torch.tensor(lengths)))


def test_each_reward_model_reads_in_its_own_way():
    """Text of 3 tokens at most and tokens, in one batch; what is cut is counted every time and said once.

    The demo's tokenizer has '1' as 5, '+' as 14 and '=' as 15. Would not catch a reader of another model.
    """
    config, warnings = run_config(), []
    config.reward_model.enable = True
    tokenizer = ModelFolder(REPOSITORY / "assets/demo/model").tokenizer
    reader = TextReader("reward_model", tokenizer, tokenizer, 3, "reward_model.max_length")
    text, tokens = Reading(), Reading()
    models = list(zip(Placement.of(config).reward_models, (text, tokens), strict=True))
    rule, clock = (lambda g, numbers=(): scored([0.0] * len(g))), PhaseClock(lambda name: None)
    rewards = Rewards(config, rule, models, warnings.append, clock, {"reward_model": reader})
    answers = single_turn(ragged([torch.tensor([1, 5, 14, 1]), torch.tensor([2, 5, 1])]), torch.tensor([3, 2]))
    answers.add(Pairs().batch(torch.tensor([0, 1])).without("input_ids"))
    answers.add(raw_prompt=[[{"role": "user", "content": "1+"}], "="])
    for _ in range(2):
        metrics = rewards.task_scores(answers, rewards.start(answers)).metrics()
    assert text.rows == [[5, 14, 5], [15, 5]] and tokens.rows == [[1, 5, 14, 1], [2, 5, 1]]
    assert metrics["reward/rm_score/mean"] == 2.5 and metrics["reward/strict_score/mean"] == 3.5
    assert metrics["reward/rm_truncated/mean"] == 0.5 and "reward/strict_truncated/mean" not in metrics
    assert warnings == [
        "1 of 2 conversations are longer than reward_model.max_length=3 in tokens of reward_model, which does not read "
        "their ends"
    ]
