"""The scorers of a run: the passes of its roles, the actor's old log-probs, the user's own, and its rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from megatron_rl.columns import ACTOR_SCORES, COLUMNS, SCORING
from megatron_rl.config.algorithms import (
    bypasses,
    scores_old_log_probs,
)
from megatron_rl.config.roles import ACTOR, RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.user_functions import load_class, reward_errors
from megatron_rl.controller.algorithm import Algorithm
from megatron_rl.controller.run_setup import RunPools
from megatron_rl.data.prompt_mixture import MixtureCursor
from megatron_rl.data.prompt_sampler import PromptSampler
from megatron_rl.dispatch import Future
from megatron_rl.errors import ConfigError, RewardError
from megatron_rl.observe.batch_metrics import parity_metrics
from megatron_rl.plain_values import describe_error, quote
from megatron_rl.records import Batch
from megatron_rl.roles.actor import Actor
from megatron_rl.roles.role_classes import CLASSES
from megatron_rl.scoring.batch_scorers import RoleScorer, Scorer
from megatron_rl.scoring.sampled_batch import SampledBatch
from megatron_rl.scoring.teachers import OtherPrompts, TeacherCall, TeacherScorer


def scorers_of(
    config: RunConfig, pools: RunPools, algorithm: Algorithm, own: Sequence[Scorer], prompts: OtherPrompts
) -> list[Scorer]:
    """Every scorer of a run but the rewards', in the order in which they start. own: the user's. prompts: teachers'.

    Rewards follow them, because conversations may have to be tokenised for reward models first, and because their
    columns are there when the user's scorers give theirs.
    """
    actor = pools.handle(ACTOR, Actor)
    taught = teacher_scorers(pools, prompts)
    return [*taught, *_actor_scorers(config, actor, algorithm), *role_scorers(pools), *own]


def user_scorers(config: RunConfig) -> list[UserScorer]:
    """The scorers of `custom_scorers`. Raises ConfigError for a class that cannot be loaded or made."""
    return [UserScorer(name, file.path, config) for name, file in config.custom_scorers.items()]


def role_scorers(pools: RunPools) -> Iterator[Scorer]:
    """A scorer for each role whose row in `config.roles` says that its call is added."""
    for spec in pools.placement.roles.values():
        if spec.score is not None and spec.score.call.is_added:
            yield RoleScorer(_method(pools, spec), spec.score.call.reads)


def teacher_scorers(pools: RunPools, prompts: OtherPrompts) -> list[Scorer]:
    """One scorer for all teachers, if there are any."""
    calls = [TeacherCall(spec, _method(pools, spec)) for spec in pools.placement.teachers]
    readers = [reader for call in calls if call.spec.score is not None for reader in call.spec.score.call.reads]
    asks = [name for name in COLUMNS.read_by(*readers) if name not in COLUMNS.read_by(SCORING)]
    return [TeacherScorer(calls, asks, prompts)] if calls else []


def _method(pools: RunPools, spec: RoleSpec) -> Callable[[Batch], Future[Batch]]:
    """The method that the role's row names for its score."""
    assert spec.score is not None
    handle = pools.handle(spec.name, CLASSES[spec.kind.name])
    method: Callable[[Batch], Future[Batch]] = getattr(handle, spec.score.call.method)
    return method


def _actor_scorers(config: RunConfig, actor: Actor, algorithm: Algorithm) -> Iterator[Scorer]:
    """Old log-probs are left to the update where that computes them itself."""
    if bypasses(config):
        yield SampledLogProbs()
    elif scores_old_log_probs(config):
        yield OldLogProbs(actor, algorithm)
    every = config.actor_rollout_ref.actor.router_replay.compare_freq
    if every > 0:
        yield UnreplayedLogProbs(actor, every)


class UserScorer:
    """A class of the user's, made once with the run's configuration. What it raises becomes a RewardError.

    in_validation: whether responses to held-out prompts are scored by it, too, as its attribute of that name says.
    """

    def __init__(self, name: str, path: str | None, config: RunConfig) -> None:
        key = f"custom_scorers.{name}.path"
        if path is None:
            raise ConfigError(f"{key}=null must be a Python file that defines the class {name}")
        kind, self._name = load_class(path, key, name, ("start", "take")), f"the scorer {name} of {path}"
        try:
            self._scorer: Scorer = kind(config)
        except Exception as error:
            raise ConfigError(f"{key}={path}: {name}(config) raised {describe_error(error)}") from error
        self.in_validation = getattr(self._scorer, "in_validation", False) is True

    def start(self, batch: SampledBatch) -> None:
        with reward_errors(self._name):
            self._scorer.start(batch)

    def take(self) -> Batch:
        with reward_errors(self._name):
            columns = self._scorer.take()
        if not isinstance(columns, Batch):
            raise RewardError(f"{self._name} must return a megatron_rl.records.Batch; it returned {quote(columns)}")
        return columns


class PromptFeedback:
    """Says to the user's sampler of prompts what the responses of a step have scored; makes no column. It must start
    first, to be taken after all others.
    """

    def __init__(self, sampler: PromptSampler) -> None:
        self._sampler = sampler

    def start(self, batch: SampledBatch) -> None:
        self._batch = batch

    def take(self) -> Batch:
        rows, scored = self._batch.rows, self._batch.all_scored
        self._sampler.update(rows["index"].tolist(), scored.scores.tolist())
        return Batch()


def prompt_feedback(cursor: MixtureCursor | PromptSampler) -> list[Scorer]:
    """The feedback to a sampler of the user's, if the prompts have one."""
    return [PromptFeedback(cursor)] if isinstance(cursor, PromptSampler) else []


class SampledLogProbs:
    """`old_log_probs` are those of the rollout."""

    def start(self, batch: SampledBatch) -> None:
        self._rows = batch.rows

    def take(self) -> Batch:
        return Batch(old_log_probs=self._rows["rollout_log_probs"])


class OldLogProbs:
    """`old_log_probs` of the actor, with what else its pass makes: see `Algorithm.scores_of_actor`."""

    def __init__(self, actor: Actor, algorithm: Algorithm) -> None:
        self._actor, self._algorithm = actor, algorithm

    def start(self, batch: SampledBatch) -> None:
        self._batch = batch
        self._scores = self._actor.log_probs(batch.rows.read_by(ACTOR_SCORES))

    def take(self) -> Batch:
        scores, metrics = self._algorithm.scores_of_actor(self._batch.rows, self._scores.get())
        self._batch.metrics |= metrics
        return scores


class UnreplayedLogProbs:
    """Compare the rollout's log-probs with a pass without router replay, every N steps; makes no column.

    Names of its metrics end in `_without_replay`.
    """

    def __init__(self, actor: Actor, every: int) -> None:
        self._actor, self._every = actor, every

    def start(self, batch: SampledBatch) -> None:
        self._batch = batch
        self._scores: Future[Batch] | None = None
        if batch.step % self._every == 0:
            self._scores = self._actor.log_probs_without_replay(batch.rows.read_by(SCORING))

    def take(self) -> Batch:
        if self._scores is not None:
            rows, scores = self._batch.rows, self._scores.get()
            metrics = parity_metrics(rows.flat("rollout_log_probs"), scores.flat("old_log_probs"))
            self._batch.metrics |= {f"{name}_without_replay": value for name, value in metrics.items()}
        return Batch()
