"""Which roles and passes a configured algorithm has, as its functions declare their needs. No torch."""

from __future__ import annotations

from typing import NamedTuple

from megatron_rl.config.declarations import (
    DISTILLATION_LOSSES,
    ESTIMATORS,
    POLICY_LOSSES,
    DistillationTraits,
    EstimatorTraits,
    PolicyLossTraits,
)
from megatron_rl.config.schema import ActorConfig, RunConfig


def policy_agg_mode(actor: ActorConfig) -> str:
    """How the policy loss's own terms become one loss; a name of LOSS_AGG_MODES."""
    return POLICY_LOSSES.traits(actor.policy_loss.loss_mode, PolicyLossTraits()).aggregation or actor.loss_agg_mode


def estimator_traits(config: RunConfig) -> EstimatorTraits:
    """Return what the configured estimator declares. One from the user's file declares no columns, and gets those that
    are made: values with `critic.enable`.
    """
    return ESTIMATORS.traits(config.algorithm.adv_estimator, EstimatorTraits())


def scored_columns(config: RunConfig) -> tuple[str, ...]:
    """Further columns that the algorithm needs from the pass for old log-probs."""
    needed = {
        "sum_pi_squared": "sum_pi_squared" in estimator_traits(config).reads,
        "entropy": config.actor_rollout_ref.actor.policy_loss.top_entropy_quantile < 1,
    }
    return tuple(column for column, is_needed in needed.items() if is_needed)


class Teaching(NamedTuple):
    """What a run asks of its teachers: the method of the role, and the column that is made by it."""

    method: str
    column: str


STUDENTS_TOP = "student_top_ids"
WAYS = (
    Teaching("log_probs", "teacher_log_probs"),
    Teaching("top_k", "teacher_top_log_probs"),
    Teaching("log_probs_at", "teacher_log_probs_at"),
    Teaching("hidden_states", "teacher_hidden"),
)


def distillation_reads(config: RunConfig) -> tuple[str, ...]:
    """The columns that the configured distillation loss reads; () without teachers."""
    if not config.distillation.enabled:
        return ()
    return DISTILLATION_LOSSES.traits(config.distillation.distillation_loss.loss_mode, DistillationTraits()).reads


def teaching(config: RunConfig) -> Teaching | None:
    """What the configured distillation loss needs of a teacher; None without teachers."""
    return next((way for way in WAYS if way.column in distillation_reads(config)), None)


def uses_critic(config: RunConfig) -> bool:
    """Whether a critic is built and trained: as `critic.enable` says, or where the estimator needs one."""
    enable = config.critic.enable
    return "old_values" in estimator_traits(config).reads if enable is None else enable


def uses_reference(config: RunConfig) -> bool:
    """Whether the frozen reference policy is built: where a KL to it enters the reward or the loss, or the estimator
    reads its log-probs.
    """
    reads = "ref_log_probs" in estimator_traits(config).reads
    return reads or config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def bypasses(config: RunConfig) -> bool:
    """Whether the rollout's log-probs are the old ones, so that the trainer makes no pass for them."""
    return config.algorithm.rollout_correction.bypass_mode


def is_on_policy(config: RunConfig) -> bool:
    """Whether the old log-probs are those of the update itself, so that the trainer makes no pass for them.

    verl's name for one mini-batch and one epoch: the only update of a step begins with the weights that such a pass
    would have. False where old log-probs are read before the update, by a KL in the reward, an estimator, a choice of
    tokens by their entropy, teachers, a correction for the rollout or generation that runs ahead; and where steps have
    no update, as every step compares log-probs.
    """
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    correction = algorithm.rollout_correction
    sizes = config.batch_sizes
    updates_once = actor.ppo_epochs == 1 and sizes.mini_batch_prompts(actor) == sizes.num_prompts
    reads_more = scored_columns(config) or STUDENTS_TOP in distillation_reads(config)
    reads_more = reads_more or "old_log_probs" in estimator_traits(config).reads
    estimates_without = algorithm.adv_estimator in ESTIMATORS and not reads_more
    corrects = correction.rollout_is or correction.rollout_rs or correction.rollout_token_veto_threshold is not None
    return (
        updates_once
        and estimates_without
        and config.trainer.critic_warmup <= 1
        and not (corrects or bypasses(config) or algorithm.use_kl_in_reward or config.may_be_stale)
    )


def scores_old_log_probs(config: RunConfig) -> bool:
    """Whether the trainer makes a pass for old log-probs."""
    return not (bypasses(config) or is_on_policy(config))


def uses_rule(config: RunConfig) -> bool:
    """Whether a rule scores responses, to training prompts or to held-out ones alone; else only reward models do."""
    return config.custom_reward_function.name is not None


def has_scores(config: RunConfig) -> bool:
    """Whether anything scores responses: a reward function, a reward model, or the environment that answers turns."""
    has_model = config.reward_model.enable or bool(config.reward_models)
    return uses_rule(config) or has_model or bool(config.actor_rollout_ref.rollout.multi_turn.rewards)


def trains_on_rule(config: RunConfig) -> bool:
    """Whether a rule scores responses to training prompts."""
    return uses_rule(config) and not config.custom_reward_function.validation_only
