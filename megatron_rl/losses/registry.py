"""Estimators and policy losses by name: the built-in ones, and those from a Python file of the user's.

A function in the file takes the same arguments and gives the same answer as a built-in one: see `estimators.Estimator`
and `policy.PolicyLoss`. The key beside its name says which file: `algorithm.custom_adv_estimator.path` for
`algorithm.adv_estimator`, `actor_rollout_ref.actor.policy_loss.custom.path` for its `loss_mode`.
"""

from __future__ import annotations

from megatron_rl.config.correction import RolloutCorrectionConfig
from megatron_rl.config.schema import ActorConfig, AlgorithmConfig
from megatron_rl.config.user_functions import load_function
from megatron_rl.losses import covariance, estimators, policy, ratios

ESTIMATORS: dict[str, estimators.Estimator] = {
    "gae": estimators.estimate_gae,
    "grpo": estimators.estimate_grpo,
    "grpo_passk": estimators.estimate_grpo_passk,
    "gdpo": estimators.estimate_gdpo,
    "gpg": estimators.estimate_gpg,
    "rloo": estimators.estimate_rloo,
    "opo": estimators.estimate_opo,
    "optimal_token_baseline": estimators.estimate_optimal_token_baseline,
    # With several turns their tokens are laid end to end first; answers here have one turn.
    "tir_optimal_token_baseline": estimators.estimate_optimal_token_baseline,
    "reinforce_plus_plus": estimators.estimate_reinforce_plus_plus,
    "reinforce_plus_plus_baseline": estimators.estimate_reinforce_plus_plus_baseline,
    "remax": estimators.estimate_remax,
}
"""`config.algorithms.ADV_ESTIMATORS` has the same names, and what each needs."""

POLICY_LOSSES: dict[str, policy.PolicyLoss] = {
    "vanilla": policy.vanilla_loss,
    "gpg": ratios.gpg_loss,
    "clip_cov": covariance.clip_cov_loss,
    "kl_cov": covariance.kl_cov_loss,
    "gspo": policy.gspo_loss,
    "geo_mean": ratios.geo_mean_loss,
    "cispo": ratios.cispo_loss,
    "sapo": ratios.sapo_loss,
    "dppo_kl": ratios.dppo_kl_loss,
    "dppo_tv": ratios.dppo_tv_loss,
    "dro": ratios.dro_loss,
    "bypass_mode": policy.vanilla_loss,
}
"""`config.algorithms.POLICY_LOSSES` has the same names."""


def estimator(config: AlgorithmConfig) -> estimators.Estimator:
    """The configured estimator. Raises ConfigError when the user's file does not provide it."""
    name, path = config.adv_estimator, config.custom_adv_estimator.path
    if name in ESTIMATORS or path is None:
        return ESTIMATORS[name]
    return load_function(path, "algorithm.custom_adv_estimator.path", name, ("samples", "config"))


def policy_loss(config: ActorConfig, correction: RolloutCorrectionConfig | None = None) -> policy.PolicyLoss:
    """The configured policy loss. Raises ConfigError when the user's file does not provide it."""
    if correction is not None and correction.bypass_mode and correction.loss_type == "reinforce":
        return ratios.gpg_loss
    name, path = config.policy_loss.loss_mode, config.policy_loss.custom.path
    if name in POLICY_LOSSES or path is None:
        return POLICY_LOSSES[name]
    return load_function(path, "actor_rollout_ref.actor.policy_loss.custom.path", name, ("tokens", "config"))
