"""The algorithms by name, what each of them needs, and which roles a configuration therefore has. No torch.

The functions themselves are in `losses/registry.py`, under the same names.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.schema import RunConfig


@dataclass(frozen=True)
class Needs:
    """What an advantage estimator needs beside token rewards.

    critic: values of a trained critic. group: two samples per prompt or more. greedy: the score of one greedy answer
    per prompt.
    """

    critic: bool = False
    group: bool = False
    greedy: bool = False


ADV_ESTIMATORS: dict[str, Needs] = {
    "gae": Needs(critic=True),
    "grpo": Needs(group=True),
    "rloo": Needs(group=True),
    "opo": Needs(group=True),
    "reinforce_plus_plus": Needs(),
    "reinforce_plus_plus_baseline": Needs(group=True),
    "remax": Needs(greedy=True),
}
"""The built-in choices of `algorithm.adv_estimator`."""

POLICY_LOSSES = ("vanilla", "gspo")
"""The built-in choices of `actor_rollout_ref.actor.policy_loss.loss_mode`."""

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
"""How the terms of tokens become one loss."""

KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""Estimators of a KL from one sample; kl and k1, mse and k2, low_var_kl and k3 are two names of one."""


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


def uses_rule(config: RunConfig) -> bool:
    """Whether a rule scores answers; else the reward model is alone."""
    return config.custom_reward_function.name is not None
