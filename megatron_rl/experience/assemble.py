"""Turn prompts, generations and scores into experience, and experience into rewards and advantages."""

from __future__ import annotations

import torch

from megatron_rl.config.correction import RolloutCorrectionConfig
from megatron_rl.config.declarations import KL_ESTIMATES
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.errors import ConfigError
from megatron_rl.losses.estimators import Estimator, Samples
from megatron_rl.losses.rollout_correction import correct_rollout
from megatron_rl.losses.rows import mean_rows, spread
from megatron_rl.records import Experience, Generations, Prompts, known, ragged, ragged_from_lengths, row_lengths


def assemble(prompts: Prompts, generations: Generations) -> Experience:
    """Join each prompt row with its response; the other fields are filled as they are computed."""
    rows = zip(prompts.prompt_ids.unbind(), generations.response_ids.unbind(), strict=True)
    return Experience(
        input_ids=ragged([torch.cat(pair) for pair in rows]),
        response_lengths=row_lengths(generations.response_ids),
        rollout_log_probs=generations.rollout_log_probs,
        versions=generations.versions,
        routed_experts=generations.routed_experts,
        groups=prompts.uid,
        truncated=generations.truncated,
        batch_size=prompts.batch_size,
    )


def add_rewards(experience: Experience, kl_coef: float, kl_type: str = "kl") -> torch.Tensor | None:
    """Fill `rewards`: -kl_coef * KL(old, reference) on every token, plus the score on the last one.

    Needs `scores`, and for a KL `old_log_probs` and `ref_log_probs`; `kl_type`: one of `KL_ESTIMATES`. An empty
    response has no token to carry its score, which stays in `scores`. Returns the KL, a scalar for the metrics: the
    mean over sequences of their mean per token, as verl reports it, where they have one; None without both log-probs,
    or without any token. Raises ValueError where a KL counts that cannot be computed.
    """
    lengths = experience.response_lengths
    has_tokens = lengths > 0
    rewards = torch.zeros(int(lengths.sum()))
    kl = None
    if kl_coef:
        known(experience.old_log_probs)
    if experience.ref_log_probs is not None and experience.old_log_probs is not None:
        estimate = KL_ESTIMATES[kl_type].function
        kl = estimate(known(experience.old_log_probs).values(), experience.ref_log_probs.values())
        rewards = -kl_coef * kl
    rewards[(lengths.cumsum(0) - 1)[has_tokens]] += known(experience.scores)[has_tokens]
    experience.rewards = ragged_from_lengths(rewards, lengths)
    return None if kl is None or not has_tokens.any() else mean_rows(kl, lengths)[has_tokens].mean()


def add_advantages(experience: Experience, estimator: Estimator, config: AlgorithmConfig) -> None:
    """Fill `advantages` and `returns` from `rewards`, and from whatever else the estimator reads, where it is there.

    Raises ConfigError when the estimator, which may be the user's, does not return two finite numbers per token.
    """
    lengths = experience.response_lengths

    def flat(field: torch.Tensor | None) -> torch.Tensor | None:
        return None if field is None else field.values()

    samples = Samples(
        rewards=known(experience.rewards).values(),
        lengths=lengths,
        groups=known(experience.groups),
        scores=known(experience.scores),
        values=flat(experience.old_values),
        greedy_scores=experience.greedy_scores,
        components=experience.components,
        old_log_probs=flat(experience.old_log_probs),
        sum_pi_squared=flat(experience.sum_pi_squared),
        rollout_weights=flat(experience.rollout_weights),
    )
    advantages, returns = estimator(samples, config)
    for name, values in (("advantages", advantages), ("returns", returns)):
        if values.shape != samples.rewards.shape or not values.isfinite().all():
            raise ConfigError(
                f"algorithm.adv_estimator={config.adv_estimator} must return finite {name} of shape "
                f"{list(samples.rewards.shape)}, one per response token; it returned {list(values.shape)}, "
                f"{int(values.isfinite().sum())} of them finite"
            )
    experience.advantages = ragged_from_lengths(advantages, lengths)
    experience.returns = ragged_from_lengths(returns, lengths)


def leave_out_truncated(experience: Experience) -> None:
    """Set `kept` to 0 on all tokens of truncated answers.

    DAPO's overlong filtering: Yu et al., arXiv:2503.14476, section 3.4. Needs `truncated`.
    """
    lengths = experience.response_lengths
    whole = spread((~known(experience.truncated)).float(), lengths)
    kept = whole if experience.kept is None else experience.kept.values() * whole
    experience.kept = ragged_from_lengths(kept, lengths)


def highest_entropy(entropy: torch.Tensor, share: float) -> torch.Tensor:
    """entropy float32 [B, (R)] of a step's tokens -> 1 on the `share` of them that have the highest, else 0.

    Wang et al., "Beyond the 80/20 Rule", arXiv:2506.01939. Of n tokens, in all answers together, 1 + floor(share
    (n - 1)) are chosen, and all that have the entropy of the last of them.
    """
    values, chosen = entropy.values(), torch.zeros_like(entropy.values())
    if len(values):
        chosen = (values >= values.topk(1 + int(share * (len(values) - 1))).values[-1]).float()
    return ragged_from_lengths(chosen, row_lengths(entropy))


def add_rollout_correction(experience: Experience, config: RolloutCorrectionConfig) -> dict[str, float]:
    """Fill `rollout_weights` and `kept` as configured, from both log-probs of the sampled tokens; returns metrics.

    Nothing of it with `bypass_mode`: then the policy loss does it, with the log-probs of its own.
    """
    if config.bypass_mode:
        return {}
    lengths = experience.response_lengths
    weights, kept, metrics = correct_rollout(
        known(experience.old_log_probs).values(), experience.rollout_log_probs.values(), lengths, config
    )
    experience.rollout_weights = None if weights is None else ragged_from_lengths(weights, lengths)
    experience.kept = None if kept is None else ragged_from_lengths(kept, lengths)
    return metrics
