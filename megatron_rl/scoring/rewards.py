"""Score responses with the reward function and with reward models; the models run at the same time as other calls."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from megatron_rl.checkpoint.model_folder import SCORE_AT_END, ModelFolder, ModelFolders
from megatron_rl.checkpoint.score_statistics import StatisticsError, read_statistics
from megatron_rl.columns import SCORING
from megatron_rl.config.algorithms import estimator_traits
from megatron_rl.config.reward_keys import (
    HELD_OUT,
    OVERLONG,
    RESPONSE_END,
    RUNNING,
    TURN_ENDS,
    ScoringModelConfig,
    scoring_key,
)
from megatron_rl.config.roles import RoleSpec, roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.dispatch import Future
from megatron_rl.errors import ConfigError
from megatron_rl.observe.phase_clock import PhaseClock
from megatron_rl.plain_values import quote
from megatron_rl.records import Batch, ragged
from megatron_rl.scoring.judging import Judging
from megatron_rl.scoring.rule import Ended, NoRule, RuleReward
from megatron_rl.scoring.scored_answers import ModelScores, ScoredAnswers, combine, with_part, with_turns
from megatron_rl.scoring.shaping import ModelShaping, RewardShaping, Shaped, overlong_penalty
from megatron_rl.scoring.text_reader import TextReader


class SequenceScorer(Protocol):
    """The calls of a reward model that the controller makes."""

    def scores(self, batch: Batch) -> Future[Batch]: ...


Pending = list[Callable[[], ModelScores]]
"""Running calls of reward models: each waits for its scores."""


class Rewards:
    """Scores responses. models: every reward model and its handle. warn: shows a warning.

    readers: name -> reader of a reward model with a tokenizer of its own; the others read the actor's tokens.
    shaping: changes the models' scores for training; None: it does not. judges: reward models that write their verdict.
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
        judges: Sequence[Judging] = (),
    ) -> None:
        self.config, self.rules, self.models, self.judges = config, rules, models, judges
        self.shaping = RewardShaping() if shaping is None else shaping
        is_apart = config.custom_reward_function.validation_only
        self._training_rules = NoRule(rules.tokenizer) if is_apart else rules
        self._rule_weight = 0.0 if is_apart else config.reward_model.rule_weight
        self._readers = dict(readers or {})
        self._warn, self._clock = warn, clock
        self._warned_of_cuts: set[str] = set()
        self._warned_of_silence: set[str] = set()

    def for_groups(self) -> Rewards:
        """Return what scores some groups of a batch at a time, in any thread: its seconds are not the step's."""
        apart = copy.copy(self)
        apart._clock = PhaseClock(lambda name: None)
        apart._training_rules = self._training_rules.for_groups()
        return apart

    def is_scored(self, numbers: Sequence[int]) -> bool:
        """Whether the responses with these request numbers that have begun are scored; does not wait."""
        return self._training_rules.is_scored(numbers)

    @property
    def stop_if_all_failed(self) -> bool:
        """Whether a batch without a single score ends the run."""
        return isinstance(self._training_rules, RuleReward) and self._training_rules.stop_if_all_failed

    def start(self, answers: Batch) -> Pending:
        """Start every reward model on the responses of its sources; do not wait.

        Raises RewardError where a reward model with a chat template of its own cannot read a conversation.
        """
        pending: Pending = []
        for judge in self.judges:
            rows = scored_rows(judge.settings, answers)
            if rows is None or len(rows):
                with self._clock.phase("reward"):
                    pending.append(judge.start(answers if rows is None else answers[rows], rows))
        # Models that read the actor's tokens score while conversations are tokenised for the others.
        for spec, model in sorted(self.models, key=lambda pair: pair[0].name in self._readers):
            rows = scored_rows(spec.settings, answers)
            if rows is not None and not len(rows):
                continue
            read = answers if rows is None else answers[rows]
            if spec.name not in self._readers:
                pending.append(partial(waited, spec, model.scores(read.read_by(SCORING)), None, rows))
                continue
            with self._clock.phase("reward"):
                text = self._readers[spec.name].read(read)
            self._warn_of_cuts(self._readers[spec.name], text.is_cut)
            pending.append(partial(waited, spec, model.scores(text.batch), text.is_cut, rows))
        return pending

    def _warn_of_cuts(self, reader: TextReader, is_cut: torch.Tensor) -> None:
        """Warn once for each model; a metric counts all cuts."""
        if is_cut.any() and reader.name not in self._warned_of_cuts:
            self._warned_of_cuts.add(reader.name)
            self._warn(
                f"{int(is_cut.sum())} of {len(is_cut)} conversations are longer than "
                f"{reader.length_key}={reader.max_length} in tokens of {reader.name}, which does not read their ends"
            )

    def _warn_of_silence(self, model: ModelScores) -> None:
        """Warn once of a judge without a single readable verdict on a batch; a metric counts them."""
        unparsed = model.counts.get("unparsed", ())
        if unparsed and all(unparsed) and model.name not in self._warned_of_silence:
            self._warned_of_silence.add(model.name)
            key, wrote = f"{scoring_key(model.name)}.judge", quote(model.texts["verdict"][0])
            self._warn(
                f"{model.name} has written no verdict on any of {len(unparsed)} responses, which get "
                f"{key}.failed_score; on the first one it wrote {wrote}; try: other {key}.mark or {key}.verdicts, or a "
                f"larger {key}.max_response_length"
            )

    def task_scores(self, answers: Batch, pending: Pending) -> ScoredAnswers:
        """Score responses with the reward function, then wait for the reward models; warn of samples that the rule
        could not score.

        For held-out prompts, and for training prompts where the rule scores those too. The models' scores are not
        shaped, so that they can be compared over a run. Raises RewardError when the rule could score no sample, or when
        a reward model gives no number.
        """
        return self._combined(self.rules, answers, pending, lambda model: None)

    def begin(self, answer: Ended) -> None:
        """Have the rule score a response to a training prompt as `RuleReward.begin`, and judges note it."""
        self._training_rules.begin(answer)
        for judge in self.judges:
            judge.begin(answer)

    def proceed(self) -> None:
        """Have judges on ranks of their own work on what has begun; the caller's thread is the one that calls ranks."""
        for judge in self.judges:
            judge.proceed()

    def _combined(
        self,
        rules: RuleReward | NoRule,
        answers: Batch,
        pending: Pending,
        shape: Callable[[ModelScores], Shaped | None],
        numbers: Sequence[int] = (),
    ) -> ScoredAnswers:
        with self._clock.phase("reward"):
            scored = rules(answers, numbers)
            if scored.first_failure is not None:
                failed = sum(outcome.failure != "" for outcome in scored.outcomes)
                first = scored.first_failure
                self._warn(f"{failed} of {len(scored.outcomes)} samples could not be scored; the first: {first}")
            models = [wait() for wait in pending]
            for model in models:
                self._warn_of_silence(model)
            models = [dataclasses.replace(model, shaped=shape(model)) for model in models]
            combined = with_turns(combine(scored, models, self._rule_weight), models, answers.num_sampled)
            return with_part(combined, "environment_reward", answers.get("environment_rewards"))

    def training_scores(
        self,
        answers: Batch,
        pending: Pending,
        counts: bool = True,
        numbers: Sequence[int] = (),
    ) -> ScoredAnswers:
        """Score responses for training: as `task_scores`, with the models' scores normalised and clipped as configured,
        minus the penalty of overlong responses if configured.

        counts: add the models' scores to their running means, but for episodes that failed. numbers: request numbers,
        if `begin` may have been called for them.
        """

        failed = answers.get("failed")
        counted = torch.full((len(answers),), counts) if failed is None else ~failed & counts

        def shape(model: ModelScores) -> Shaped | None:
            return self.shaping(model.name, model.scores, model.scores[counted[model.all_rows]])

        scored = self._combined(self._training_rules, answers, pending, shape, numbers)
        overlong = self.config.reward_model.overlong_buffer
        if not overlong.enable:
            return scored
        lengths, longest = answers.num_sampled, self.config.data.max_response_length
        penalty = overlong_penalty(lengths, longest, overlong.len, overlong.penalty_factor)
        if OVERLONG in (self.config.algorithm.gdpo_reward_keys or ()):
            return with_part(scored, OVERLONG, penalty)
        return dataclasses.replace(scored, scores=scored.scores + penalty)

    def components(self, scored: ScoredAnswers) -> torch.Tensor | None:
        """float32 [B, K]: the numbers of each response that `algorithm.gdpo_reward_keys` names; None if the estimator
        does not read them. Raises RewardError.
        """
        if "components" not in estimator_traits(self.config).reads:
            return None
        keys, failed = self.config.algorithm.gdpo_reward_keys or [], self.config.reward_model.failed_score
        return torch.tensor([scored.numbers(key, failed) for key in keys], dtype=torch.float32).T.contiguous()

    def greedy_scores(self, rows: Batch, answers: Batch, pending: Pending, numbers: Sequence[int] = ()) -> torch.Tensor:
        """float32 [B]: for each of `rows` the score of its group's greedy response; `answers` has one per group, in
        the order of `records.one_per_group`. numbers: as in `training_scores`.
        """
        _, group = rows["uid"].unique(return_inverse=True)
        scored = self.training_scores(answers, pending, False, numbers)
        return scored.scores[group]


def waited(
    spec: RoleSpec, scores: Future[Batch], is_cut: torch.Tensor | None, rows: torch.Tensor | None
) -> ModelScores:
    """Wait for the scores of a reward model. is_cut, rows: see `ModelScores`."""
    found = scores.get()
    return ModelScores(
        spec.name, found["scores"], spec.settings.weight, is_cut, rows=rows, turns=found.get("turn_rewards")
    )


def turn_rewards(rows: Batch, scored: ScoredAnswers) -> torch.Tensor | None:
    """Ragged float32 [B, (N)]: the environment's rewards for turns, and those of process reward models; None where no
    model gives any.
    """
    if scored.turns is None:
        return None
    given, found = rows.get("turn_rewards"), ragged(scored.turns)
    return found if given is None else rows.per_sampled_token(found.values() + given.values())


def reward_shaping(config: RunConfig) -> RewardShaping:
    """Build the shaping that the reward models' keys ask for, with the statistics in their folders.

    Raises ConfigError where a folder has no statistics.
    """
    shapes = {}
    for name, keys in config.scoring_models.items():
        path, fixed = str(keys.model.path), None
        if keys.normalize_reward == HELD_OUT:
            try:
                statistics = read_statistics(Path(path).expanduser())
            except StatisticsError as error:
                raise ConfigError(f"{scoring_key(name)}.model.path={path}: {error}") from error
            fixed = (statistics.mean, statistics.std)
        clip = None if keys.reward_clip_range is None else (keys.reward_clip_range[0], keys.reward_clip_range[1])
        if keys.normalize_reward is not None or clip is not None:
            shapes[name] = ModelShaping(path, fixed, keys.normalize_reward == RUNNING, clip)
    return RewardShaping(shapes)


def scored_rows(settings: ScoringModelConfig, answers: Batch) -> torch.Tensor | None:
    """int64: the rows whose responses a reward model scores; None if it scores all sources."""
    if settings.data_sources is None:
        return None
    mine = set(settings.data_sources)
    sources = answers.objects("data_source")
    return torch.tensor([row for row, source in enumerate(sources) if source in mine], dtype=torch.int64)


def check_turns(config: RunConfig) -> None:
    """Raise ConfigError where what scores turns does not read the policy's tokens, which have them."""
    for name, keys in config.scoring_models.items():
        key, tokenizer = scoring_key(name), keys.model.input_tokenizer
        if keys.score_at == TURN_ENDS and (keys.is_judge or tokenizer is not None):
            reads = f"{key}.judge.prompt asks a judge" if keys.is_judge else f"{key}.model.input_tokenizer={tokenizer}"
            rule = "needs a classifier that reads the policy's tokens, in which turns end"
            raise ConfigError(f"{key}.score_at={TURN_ENDS} {rule}, and {reads}; try: {key}.score_at={RESPONSE_END}")
        if keys.step_end is not None and (keys.score_at != TURN_ENDS or not keys.step_end):
            given = f"{key}.step_end={quote(keys.step_end)}, {key}.score_at={keys.score_at}"
            raise ConfigError(f"{given}: steps are text, and scored with turns alone; try: {key}.score_at={TURN_ENDS}")


def text_readers(
    config: RunConfig, folders: ModelFolders, datasets: Sequence[PromptDataset]
) -> tuple[dict[str, TextReader], list[str]]:
    """Return the readers of reward models with a tokenizer of their own, by role, and notes for the user.

    folders: of the run, by path. All prompts of a model's sources are read once. Raises ConfigError where a tokenizer
    cannot be loaded, where it has more tokens than its model, and where prompts cannot be read.
    """
    readers, notes = {}, []
    check_turns(config)
    for role in roles_of(config):
        if not role.reads_text or role.score is None or role.score.longest is None:
            continue
        key, given = f"{role.key}.model.input_tokenizer", role.settings.model.input_tokenizer
        policy = (folders.get(given) or ModelFolder(given, key)).tokenizer
        folder = folders[role.model_path]
        own, settings = folder.tokenizer, folder.hf_config
        largest, size = max(own.get_vocab().values()), settings.vocab_size
        if largest >= size:
            raise ConfigError(
                f"{role.model_key}={role.model_path}: its tokenizer has a token with id {largest}, and the "
                f"vocab_size of its config.json is {size}: its files do not go together"
            )
        ends = folder.end_tokens.ids if getattr(settings, SCORE_AT_END, False) else ()
        limit = role.score.longest, f"{role.key}.max_length"
        readers[role.name] = TextReader(role.name, policy, own, *limit, tuple(ends))
        texts = (data.texts(role.settings.data_sources) for data in datasets)
        conversations, prompt_ids = zip(*texts, strict=True)
        notes += readers[role.name].check(
            [text for part in conversations for text in part], [ids for part in prompt_ids for ids in part]
        )
    return readers, notes
