"""The algorithms by name, what each of them needs, and which roles a configuration therefore has. No torch.

The functions themselves are in `losses/registry.py`, under the same names.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.schema import ActorConfig, RunConfig


@dataclass(frozen=True)
class Needs:
    """What an advantage estimator needs beside token rewards.

    critic: values of a trained critic. group: it compares the samples of a prompt, and has no baseline for a lone one.
    second: two samples per prompt or more. greedy: the score of one greedy answer per prompt. sum_pi_squared: of every
    token's distribution the sum of squared probabilities, which the trainer's pass for old log-probs also gives.
    components: the further numbers of the reward function that `algorithm.gdpo_reward_keys` names.
    """

    critic: bool = False
    group: bool = False
    second: bool = False
    greedy: bool = False
    sum_pi_squared: bool = False
    components: bool = False


ADV_ESTIMATORS: dict[str, Needs] = {
    "gae": Needs(critic=True),
    "grpo": Needs(group=True),
    "grpo_passk": Needs(group=True, second=True),
    "gdpo": Needs(group=True, components=True),
    "gpg": Needs(group=True),
    "rloo": Needs(group=True),
    "opo": Needs(group=True),
    "optimal_token_baseline": Needs(group=True, sum_pi_squared=True),
    "tir_optimal_token_baseline": Needs(group=True, sum_pi_squared=True),
    "reinforce_plus_plus": Needs(),
    "reinforce_plus_plus_baseline": Needs(group=True),
    "remax": Needs(greedy=True),
}
"""The built-in choices of `algorithm.adv_estimator`."""

POLICY_LOSSES = (
    *("vanilla", "gpg", "clip_cov", "kl_cov", "gspo", "geo_mean", "cispo", "sapo", "dppo_kl", "dppo_tv", "dro"),
    "bypass_mode",
)
"""The built-in choices of `actor_rollout_ref.actor.policy_loss.loss_mode`."""

MEAN_OVER_ANSWERS = ("geo_mean", "sapo")
"""Policy losses that are defined as a mean over answers, whatever `loss_agg_mode` says of KL and entropy."""

BYPASS_LOSSES = ("vanilla", "bypass_mode")
"""Policy losses in whose place `rollout_correction.loss_type` may put another."""

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
"""How the terms of tokens become one loss."""

KL_ESTIMATES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_TYPES = (*KL_ESTIMATES, *(f"{name}+" for name in KL_ESTIMATES))
"""Estimators of a KL from one sample; kl and k1, mse and k2, low_var_kl and k3 are two names of one. With a + the
value is the same and the gradient k2's."""


def policy_agg_mode(actor: ActorConfig) -> str:
    """How the policy loss's own terms become one loss; a name of LOSS_AGG_MODES."""
    return "seq-mean-token-mean" if actor.policy_loss.loss_mode in MEAN_OVER_ANSWERS else actor.loss_agg_mode


def needs_of(config: RunConfig) -> Needs:
    """What the configured estimator needs; one from the user's file nothing but what `critic.enable` says."""
    return ADV_ESTIMATORS.get(config.algorithm.adv_estimator, Needs())


def uses_critic(config: RunConfig) -> bool:
    """Whether a critic is built and trained: as `critic.enable` says, or where the estimator needs one."""
    enable = config.critic.enable
    return needs_of(config).critic if enable is None else enable


def uses_reference(config: RunConfig) -> bool:
    """Whether the frozen reference policy is built: where a KL to it enters the reward or the loss."""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def bypasses(config: RunConfig) -> bool:
    """Whether the rollout's log-probs are the old ones, so that the trainer makes no pass for them."""
    return config.algorithm.rollout_correction.bypass_mode


def is_on_policy(config: RunConfig) -> bool:
    """Whether the old log-probs are those of the update itself, so that the trainer makes no pass for them.

    verl's name for one mini-batch and one epoch: the only update of a step begins with the weights that such a pass
    would have. Not where somebody reads old log-probs before it: a KL in the reward, an estimator, what corrects for
    the rollout, generation that runs ahead; nor where steps pass without an update, as every step compares log-probs.
    """
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    correction = algorithm.rollout_correction
    sizes = config.batch_sizes
    updates_once = actor.ppo_epochs == 1 and sizes.mini_batch_prompts(actor) == sizes.num_prompts
    needs = ADV_ESTIMATORS.get(algorithm.adv_estimator)
    estimates_without = needs is not None and not needs.sum_pi_squared
    corrects = correction.rollout_is or correction.rollout_rs or correction.rollout_token_veto_threshold is not None
    return (
        updates_once
        and estimates_without
        and config.trainer.critic_warmup <= 1
        and not (corrects or bypasses(config) or algorithm.use_kl_in_reward or config.samples_in_slices)
    )


def scores_old_log_probs(config: RunConfig) -> bool:
    """Whether the trainer makes a pass for old log-probs."""
    return not (bypasses(config) or is_on_policy(config))


def uses_rule(config: RunConfig) -> bool:
    """Whether a rule scores answers, those to training prompts or held-out ones alone; else reward models are alone."""
    return config.custom_reward_function.name is not None


def trains_on_rule(config: RunConfig) -> bool:
    """Whether a rule scores answers to training prompts."""
    return uses_rule(config) and not config.custom_reward_function.validation_only
