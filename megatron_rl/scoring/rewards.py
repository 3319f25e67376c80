"""What answers are worth: the rule's score, and those of the reward models, which score beside whatever else runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from megatron_rl.checkpoint.score_statistics import StatisticsError, read_statistics
from megatron_rl.config.algorithms import needs_of
from megatron_rl.config.roles import REWARD_MODEL, RoleSpec, roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.value_tables import HELD_OUT, RUNNING
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.dispatch import Future
from megatron_rl.errors import ConfigError
from megatron_rl.experience.assemble import assemble
from megatron_rl.observe.phase_clock import PhaseClock
from megatron_rl.records import Generations, Prompts, Sequences, SequenceScores, known, row_lengths
from megatron_rl.scoring.combined import ModelScores, combine
from megatron_rl.scoring.overlong import overlong_penalty
from megatron_rl.scoring.rule import NoRule, RuleReward, ScoredAnswers
from megatron_rl.scoring.shaping import ModelShaping, RewardShaping
from megatron_rl.scoring.text_reader import TextReader


class SequenceScorer(Protocol):
    """A reward model as the controller calls it."""

    def scores(self, sequences: Sequences) -> Future[SequenceScores]: ...


@dataclass(frozen=True)
class PendingScores:
    """Scores of a reward model that are under way. is_cut: bool [B], rows whose end it does not read; None: it reads
    the actor's tokens, which are never cut. rows: int64 [B], of all answers those that it scores; None: all.
    """

    spec: RoleSpec
    scores: Future[SequenceScores]
    is_cut: torch.Tensor | None
    rows: torch.Tensor | None = None

    def get(self) -> ModelScores:
        """Wait for them."""
        scores, weight = self.scores.get().scores, self.spec.settings.weight
        return ModelScores(self.spec.name, scores, weight, self.is_cut, rows=self.rows)


Pending = list[PendingScores]

Shaping = Callable[[ModelScores], ModelScores]
"""What becomes of a model's scores before they are added up."""


class Rewards:
    """Scores answers. models: every reward model and its handle. warn: says a line that nobody should miss.

    readers: name -> how a reward model with a tokenizer of its own reads; the others read the actor's tokens.
    shaping: what training makes of the models' scores; None: nothing.
    """

    def __init__(
        self,
        config: RunConfig,
        rules: RuleReward | NoRule,
        models: Sequence[tuple[RoleSpec, SequenceScorer]],
        warn: Callable[[str], None],
        clock: PhaseClock,
        readers: Mapping[str, TextReader] | None = None,
        shaping: RewardShaping | None = None,
    ) -> None:
        self.config, self.rules, self.models = config, rules, models
        self.shaping = RewardShaping() if shaping is None else shaping
        is_apart = config.custom_reward_function.validation_only
        self._training_rules = NoRule(rules.tokenizer) if is_apart else rules
        self._rule_weight = 0.0 if is_apart else config.reward_model.rule_weight
        self._readers = dict(readers or {})
        self._warn, self._clock = warn, clock
        self._cut_said: set[str] = set()

    def start(self, prompts: Prompts, generations: Generations) -> Pending:
        """Have every reward model score its sources' answers, beside whatever else happens.

        Raises RewardError where one with a chat template of its own cannot read a conversation.
        """
        pending: Pending = []
        # Those that read tokens score while conversations are tokenised for the others.
        for spec, model in sorted(self.models, key=lambda one: one[0].name in self._readers):
            rows = scored_rows(spec, prompts)
            if rows is not None and not len(rows):
                continue
            asked, answers = (prompts, generations) if rows is None else (prompts[rows], generations[rows])
            if spec.name not in self._readers:
                sequences = assemble(asked, answers).sequences()
                pending.append(PendingScores(spec, model.scores(sequences), None, rows))
                continue
            with self._clock.phase("reward"):
                read = self._readers[spec.name].read(asked, answers)
            self._say_cut(self._readers[spec.name], read.is_cut)
            pending.append(PendingScores(spec, model.scores(read.sequences), read.is_cut, rows))
        return pending

    def _say_cut(self, reader: TextReader, is_cut: torch.Tensor) -> None:
        """The first time; a metric counts them."""
        if is_cut.any() and reader.name not in self._cut_said:
            self._cut_said.add(reader.name)
            self._warn(
                f"{int(is_cut.sum())} of {len(is_cut)} conversations are longer than "
                f"{reader.length_key}={reader.max_length} in tokens of {reader.name}, which does not read their ends"
            )

    def task_scores(self, prompts: Prompts, generations: Generations, pending: Pending) -> ScoredAnswers:
        """The scores of answers, by the rule while reward models do; says so when the rule could not score some.

        Of held-out prompts, or, where the rule is asked about both, of any. Those of reward models count as they are,
        so that they can be compared over a run. Raises RewardError when the rule could score none, or when a reward
        model gives no number.
        """
        return self._combined(self.rules, prompts, generations, pending, lambda scores: scores)

    def _combined(
        self,
        rules: RuleReward | NoRule,
        prompts: Prompts,
        generations: Generations,
        pending: Pending,
        shaped: Shaping,
    ) -> ScoredAnswers:
        with self._clock.phase("reward"):
            scored = rules(prompts, generations)
            if scored.first_failure is not None:
                failed = sum(outcome.failure != "" for outcome in scored.outcomes)
                first = scored.first_failure
                self._warn(f"{failed} of {len(scored.outcomes)} samples could not be scored; the first: {first}")
            return combine(scored, [shaped(one.get()) for one in pending], self._rule_weight)

    def training_scores(
        self, prompts: Prompts, generations: Generations, pending: Pending, counts: bool = True
    ) -> ScoredAnswers:
        """What training rewards: the task's scores with those of reward models normalised and clipped as configured,
        less the penalty of overlong answers if configured.

        counts: whether the answers join what scores are normalised by, where that is a running mean.
        """

        def shaped(scores: ModelScores) -> ModelScores:
            return dataclasses.replace(scores, shaped=self.shaping(scores.name, scores.scores, counts))

        scored = self._combined(self._training_rules, prompts, generations, pending, shaped)
        overlong = self.config.reward_model.overlong_buffer
        if not overlong.enable:
            return scored
        lengths, longest = row_lengths(generations.response_ids), self.config.data.max_response_length
        penalty = overlong_penalty(lengths, longest, overlong.len, overlong.penalty_factor)
        return dataclasses.replace(scored, scores=scored.scores + penalty)

    def components(self, scored: ScoredAnswers) -> torch.Tensor | None:
        """float32 [B, K]: of each answer the numbers that `algorithm.gdpo_reward_keys` names; None where the estimator
        takes none. Raises RewardError.
        """
        if not needs_of(self.config).components:
            return None
        keys, failed = self.config.algorithm.gdpo_reward_keys or [], self.config.reward_model.failed_score
        return torch.tensor([scored.numbers(key, failed) for key in keys], dtype=torch.float32).T.contiguous()

    def greedy_scores(self, prompts: Prompts, generations: Generations, pending: Pending) -> torch.Tensor:
        """float32 [B]: for each row of `prompts` the score of its group's answer, in the order of `one_per_group`."""
        _, group = known(prompts.uid).unique(return_inverse=True)
        return self.training_scores(prompts.one_per_group(), generations, pending, counts=False).scores[group]


def reward_shaping(config: RunConfig) -> RewardShaping:
    """As the keys of the reward models say, with the statistics in their folders. Raises ConfigError."""
    shapes = {}
    for role in roles_of(config):
        if role.kind != REWARD_MODEL:
            continue
        keys, fixed = role.settings, None
        if keys.normalize_reward == HELD_OUT:
            try:
                found = read_statistics(Path(role.model_path).expanduser())
            except StatisticsError as error:
                raise ConfigError(f"{role.model_key}={role.model_path}: {error}") from error
            fixed = (found.mean, found.std)
        clip = None if keys.reward_clip_range is None else (keys.reward_clip_range[0], keys.reward_clip_range[1])
        if keys.normalize_reward is not None or clip is not None:
            shapes[role.name] = ModelShaping(role.model_path, fixed, keys.normalize_reward == RUNNING, clip)
    return RewardShaping(shapes)


def scored_rows(spec: RoleSpec, prompts: Prompts) -> torch.Tensor | None:
    """int64: the rows whose answers a reward model scores; None where it scores those of all sources."""
    if spec.settings.data_sources is None:
        return None
    mine = set(spec.settings.data_sources)
    return torch.tensor([row for row, source in enumerate(prompts.data_source) if source in mine], dtype=torch.int64)


def text_readers(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, datasets: Sequence[PromptDataset]
) -> tuple[dict[str, TextReader], list[str]]:
    """The readers of reward models with a tokenizer of their own, by role, and what a user should know of them.

    tokenizer: the actor's. All prompts of a model's sources are read once. Raises ConfigError where a tokenizer cannot
    be loaded, has more tokens than its model, or where prompts cannot be read.
    """
    readers, notes = {}, []
    for role in roles_of(config):
        if not role.reads_text or role.score is None or role.score.longest is None:
            continue
        key, given = f"{role.key}.model.input_tokenizer", role.settings.model.input_tokenizer
        policy = tokenizer if given == config.actor_rollout_ref.model.path else load_tokenizer(given, key)
        own = load_tokenizer(role.model_path, role.model_key)
        largest, size = max(own.get_vocab().values()), AutoConfig.from_pretrained(role.model_path).vocab_size
        if largest >= size:
            raise ConfigError(
                f"{role.model_key}={role.model_path}: its tokenizer has a token of number {largest}, and the "
                f"vocab_size of its config.json is {size}: its files do not go together"
            )
        readers[role.name] = TextReader(role.name, policy, own, role.score.longest, f"{role.key}.max_length")
        texts = (data.texts(role.settings.data_sources) for data in datasets)
        conversations, prompt_ids = zip(*texts, strict=True)
        notes += readers[role.name].check(
            [one for part in conversations for one in part], [ids for part in prompt_ids for ids in part]
        )
    return readers, notes
