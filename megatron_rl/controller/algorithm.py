"""Compute KL, advantages and mini-batches of a batch, and compare the rollout's log-probs with the trainer's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from megatron_rl.columns import ACTOR_UPDATE, CRITIC_UPDATE
from megatron_rl.config.algorithm_keys import KlCtrlConfig
from megatron_rl.config.algorithms import bypasses
from megatron_rl.config.rollout_keys import RolloutConfig
from megatron_rl.config.schema import ActorConfig, CriticConfig, RunConfig
from megatron_rl.errors import ParityError
from megatron_rl.experience.batches import mini_batch_rows
from megatron_rl.experience.rewards_and_advantages import (
    add_advantages,
    add_rewards,
    add_rollout_correction,
    highest_entropy,
    leave_out_truncated,
)
from megatron_rl.experience.staleness import is_fresh, staleness_metrics
from megatron_rl.losses.estimators import load_estimator
from megatron_rl.losses.kl import AdaptiveKL, FixedKL
from megatron_rl.losses.policy import load_policy_loss
from megatron_rl.observe.batch_metrics import parity_metrics, truncation_limit, truncation_metrics
from megatron_rl.observe.phase_clock import PhaseClock
from megatron_rl.records import Batch

WARNING_STEPS = {"cuda": 5, "cpu": 0}
"""First steps in which large differences of log-probs only warn: the bounds come from small models on CPUs."""


class Algorithm:
    """The configured estimator, KL control and mini-batching. Raises ConfigError for functions that cannot be loaded.

    warn: prints a sentence. logprob_diff_max: the largest difference so far between the rollout's log-probs and the
    trainer's.
    """

    def __init__(self, config: RunConfig, clock: PhaseClock, warn: Callable[[str], None] = print) -> None:
        self.config, self._clock, self._warn = config, clock, warn
        self.estimator = load_estimator(config.algorithm)
        # The actor's, loaded here too so that its errors come now.
        load_policy_loss(config.actor_rollout_ref.actor, config.algorithm.rollout_correction)
        self.kl_ctrl = kl_controller(config.algorithm.kl_ctrl)
        self.logprob_diff_max = 0.0

    def add_advantages(self, experience: Batch, step: int) -> dict[str, float]:
        """Fill rewards, advantages, returns and the weights of rollout correction; returns metrics.

        If the update computes the old log-probs itself, nothing here depends on them, and `compare` follows the update.
        Raises ParityError as `compare`.
        """
        metrics = {} if "old_log_probs" not in experience else self.compare(experience, step)
        with self._clock.phase("adv"):
            if "old_log_probs" not in experience:
                add_rewards(experience, 0.0, by_turns=self.config.algorithm.turn_rewards)
            add_advantages(experience, self.estimator, self.config.algorithm)
            if self.config.algorithm.mask_truncated_completions:
                leave_out_truncated(experience)
        return metrics

    def compare(self, experience: Batch, step: int) -> dict[str, float]:
        """Compare the old log-probs with the rollout's and the reference's: metrics, corrections, and rewards with KL.

        Raises ParityError if the rollout's log-probs differ from the trainer's.
        """
        metrics = self.check_rollout_parity(experience, step) | staleness_metrics(experience, step)
        with self._clock.phase("adv"):
            metrics |= add_rollout_correction(experience, self.config.algorithm.rollout_correction)
            return metrics | self.penalise_kl(experience)

    def actor_batches(self, experience: Batch, step: int) -> Iterator[Batch]:
        """The mini-batches of a step's actor update, of several epochs."""
        actor = self.config.actor_rollout_ref.actor
        batch = experience.read_by(ACTOR_UPDATE)
        if actor.router_replay.mode == "disabled":
            batch = batch.without("routed_experts")
        return (batch[rows] for rows in mini_batch_rows(len(experience), *self.mini_batching(actor, step)))

    def on_policy_batch(self, experience: Batch, step: int) -> tuple[Batch, Tensor]:
        """(the only mini-batch of a step's actor update, the row numbers of the experience in its order)."""
        actor = self.config.actor_rollout_ref.actor
        (rows,) = mini_batch_rows(len(experience), *self.mini_batching(actor, step))
        return experience.read_by(ACTOR_UPDATE)[rows], rows

    def take_old_log_probs(
        self, experience: Batch, log_probs: Batch | None, rows: Tensor, step: int
    ) -> dict[str, float]:
        """Store the old log-probs that the update of `on_policy_batch` computed, in the order of `rows`, and `compare`.

        Raises ValueError if the update returned none, ParityError as `compare`.
        """
        if log_probs is None:
            raise ValueError("the actor's update has returned no log-probs")
        scores, metrics = self.scores_of_actor(experience, log_probs[rows.argsort()])
        experience.add(scores)
        return metrics | self.compare(experience, step)

    def scores_of_actor(self, experience: Batch, scores: Batch) -> tuple[Batch, dict[str, float]]:
        """(columns, metrics) of the actor's pass for old log-probs: also the experts, which updates replay, and the
        tokens to train.

        `training/rollout_experts_diff` is the share of the experts used by the engine that the trainer's routers would
        not have chosen; only if the engine returns its experts.
        """
        metrics = {}
        if "num_other_experts" in scores:
            share = float(scores["num_other_experts"].sum()) / max(experience.stored("routed_experts").numel(), 1)
            metrics["training/rollout_experts_diff"] = share
        if "entropy" in scores:
            loss = self.config.actor_rollout_ref.actor.policy_loss
            scores.add(trained=highest_entropy(scores["entropy"], loss.top_entropy_quantile))
        return scores, metrics

    def critic_batches(self, experience: Batch, step: int) -> Iterator[Batch]:
        """The mini-batches of a step's critic update, of several epochs."""
        critic = self.config.critic
        batch = experience.read_by(CRITIC_UPDATE)
        return (batch[rows] for rows in mini_batch_rows(len(experience), *self.mini_batching(critic, step)))

    def mini_batching(self, role: ActorConfig | CriticConfig, step: int) -> tuple[int, int, int | None]:
        """(rows per optimizer step, epochs, seed of the split or None) for one step of a role's update."""
        rows = self.config.batch_sizes.mini_batch_samples(role)
        seed = self.config.trainer.seed * 1_000_003 + step * role.ppo_epochs
        return rows, role.ppo_epochs, seed if role.shuffle else None

    def check_rollout_parity(self, experience: Batch, step: int) -> dict[str, float]:
        """Compare the engine's log-probs of its samples with the trainer's, on responses that the newest weights
        sampled.

        Where top_p or top_k cut the engine's distribution, the two may differ by the mass that is left, and no more.
        Raises ParityError for a `parity_problem`, but in the first steps, which warn of it; not on recorded samples.
        With `bypass_mode` there are no log-probs of the trainer to compare.
        """
        if bypasses(self.config):
            return {}
        rollout = self.config.actor_rollout_ref.rollout
        fresh = is_fresh(experience, step)
        both = experience.flat("rollout_log_probs")[fresh], experience.flat("old_log_probs")[fresh]
        metrics = parity_metrics(*both)
        if is_truncated(rollout):
            metrics |= truncation_metrics(*both, rollout.top_p, rollout.top_k)
        largest = metrics.get(f"{compared_metric(rollout)}_max", 0.0)  # of no token there is nothing to compare
        self.logprob_diff_max = max(self.logprob_diff_max, largest)
        if self.config.trainer.rollouts_from is None:  # samples of another run need not be of this policy
            self._stop_or_warn(parity_problem(metrics, rollout), step)
        return metrics

    def _stop_or_warn(self, problem: str, step: int) -> None:
        """Raise ParityError for a `parity_problem`; in the first steps warn."""
        num_warning = self.config.actor_rollout_ref.rollout.logprob_diff_warn_steps
        if num_warning is None:
            num_warning = WARNING_STEPS[self.config.trainer.device]
        if problem and step > num_warning:
            raise ParityError(problem)
        if problem:
            key = "actor_rollout_ref.rollout.logprob_diff_warn_steps"
            self._warn(f"{problem}; step {step} only warns: {key}={num_warning}")

    def penalise_kl(self, experience: Batch) -> dict[str, float]:
        """Fill `rewards`, update the KL coefficient for the next step, and report KL and coefficient as verl does."""
        algorithm = self.config.algorithm
        kl_coef = self.kl_ctrl.coef if algorithm.use_kl_in_reward else 0.0
        kl = add_rewards(experience, kl_coef, algorithm.kl_penalty, algorithm.turn_rewards)
        if kl is None:
            return {}
        self.kl_ctrl.update(float(kl), int((experience.num_sampled > 0).sum()))
        return {"actor/reward_kl_penalty": float(kl), "actor/reward_kl_penalty_coeff": kl_coef}

    def state_dict(self) -> dict[str, Any]:
        """State that the next steps depend on; JSON-ready."""
        return {
            "kl_ctrl": {"type": self.config.algorithm.kl_ctrl.type, "coef": self.kl_ctrl.coef},
            "logprob_diff_max": self.logprob_diff_max,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        # A fixed coefficient comes from the configuration, which the user may have changed on purpose.
        if state["kl_ctrl"]["type"] == self.config.algorithm.kl_ctrl.type == "adaptive":
            self.kl_ctrl.coef = state["kl_ctrl"]["coef"]
        self.logprob_diff_max = state["logprob_diff_max"]


def is_truncated(rollout: RolloutConfig) -> bool:
    """Whether the engine samples from a part of the distribution."""
    return rollout.top_p != 1.0 or rollout.top_k != -1


def compared_metric(rollout: RolloutConfig) -> str:
    """Return the name, without its statistic, of the difference between rollout and trainer that has bounds."""
    return f"training/rollout_logprob_{'outside' if is_truncated(rollout) else 'diff'}"


def parity_problem(metrics: Mapping[str, float], rollout: RolloutConfig) -> str:
    """Return what is wrong if the compared metrics exceed their bounds or are NaN; "" for a batch without tokens."""
    beyond = ""
    if is_truncated(rollout):
        limit = truncation_limit(rollout.top_p, rollout.top_k)
        beyond = f" more than top_p={rollout.top_p} and top_k={rollout.top_k} explain (0 to {limit:.3g})"
    for extent, metric, key, bound in (
        ("in the mean", "mean", "logprob_diff_mean_bound", rollout.logprob_diff_mean_bound),
        ("on 1% of them or more", "p99", "logprob_diff_bound", rollout.logprob_diff_bound),
    ):
        difference = metrics.get(f"{compared_metric(rollout)}_{metric}", 0.0)
        if not difference <= bound:
            return (
                f"log-probs of the rollout and of the trainer differ by {difference:.3g}{beyond} on sampled tokens, "
                f"{extent}; actor_rollout_ref.rollout.{key} is {bound:.3g}"
            )
    return ""


def kl_controller(config: KlCtrlConfig) -> FixedKL | AdaptiveKL:
    """The configured control of the KL coefficient, at its start."""
    if config.type == "adaptive":
        return AdaptiveKL(config.kl_coef, config.target_kl, config.horizon)
    return FixedKL(config.kl_coef)
