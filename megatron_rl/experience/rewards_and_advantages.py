"""Columns of a batch that follow from others: rewards, advantages, importance weights and masks."""

from __future__ import annotations

import torch

from megatron_rl.config.algorithm_keys import AlgorithmConfig
from megatron_rl.config.correction import RolloutCorrectionConfig
from megatron_rl.config.declarations import ESTIMATORS, KL_ESTIMATES, EstimatorTraits
from megatron_rl.errors import ConfigError
from megatron_rl.losses.estimators import Estimator, Samples
from megatron_rl.losses.rollout_correction import correct_rollout
from megatron_rl.losses.rows import mean_rows, spread, sum_rows
from megatron_rl.records import Batch, ragged_from_lengths, row_lengths


def add_rewards(experience: Batch, kl_coef: float, kl_type: str = "kl", by_turns: bool = False) -> torch.Tensor | None:
    """Fill `rewards`: -kl_coef * KL(old, reference) on every sampled token, plus the score on a row's last one.

    by_turns: what the score has of `turn_rewards` is on the last token of each turn. Fill `totals`, too: the score plus
    the sum of a row's penalties, so that equal scores stay equal however they are spread over tokens.
    Needs `scores`, and for a KL `old_log_probs` and `ref_log_probs`; `kl_type`: one of `KL_ESTIMATES`. A row
    without a sampled token has none to carry its score, which stays in `scores`. Returns the KL, a scalar for the
    metrics: the mean over rows of their mean per sampled token, as verl reports it, where they have one; None without
    both log-probs, or without any sampled token. Raises ValueError where a KL counts that cannot be computed.
    """
    lengths = experience.num_sampled
    has_tokens = lengths > 0
    rewards = torch.zeros(int(lengths.sum()))
    kl = None
    if "ref_log_probs" in experience and (kl_coef or "old_log_probs" in experience):
        estimate = KL_ESTIMATES[kl_type].function
        kl = estimate(experience.flat("old_log_probs"), experience.flat("ref_log_probs"))
        rewards = -kl_coef * kl
    scores = experience["scores"]
    experience.add(totals=scores + sum_rows(rewards, lengths))
    if by_turns and "turn_rewards" in experience:
        of_turns = experience.flat("turn_rewards")
        rewards, scores = rewards + of_turns, scores - sum_rows(of_turns, lengths)
    rewards[(lengths.cumsum(0) - 1)[has_tokens]] += scores[has_tokens]
    experience.add(rewards=experience.per_sampled_token(rewards))
    return None if kl is None or not has_tokens.any() else mean_rows(kl, lengths)[has_tokens].mean()


def turn_numbers(experience: Batch) -> torch.Tensor:
    """int64 [sampled tokens]: the turn of each, counted over all rows: neighbouring sampled tokens are one turn."""
    sampled = experience.flat("sampled")
    return (run_begins(sampled).cumsum(0) - 1)[sampled]  # the first token of a row is not sampled


def run_begins(mask: torch.Tensor) -> torch.Tensor:
    """bool [N]: where `mask` [N] is True and was not at the place before."""
    begins = mask.clone()
    begins[1:] &= ~mask[:-1]
    return begins


def observation_numbers(experience: Batch) -> torch.Tensor:
    """int64 [sampled tokens]: equal for tokens of turns that have read the same tokens since the turn before: an
    observation, or the prompt of a row or of a conversation.
    """
    ids, sampled = experience.flat("input_ids"), experience.flat("sampled")
    reads = run_begins(~sampled)
    lengths = row_lengths(experience["input_ids"])
    reads[(lengths.cumsum(0) - lengths)[lengths > 0]] = True
    if "conversation_starts" in experience:
        reads |= experience.flat("conversation_starts")
    begins, firsts = run_begins(sampled).nonzero().flatten(), reads.nonzero().flatten()
    firsts = firsts[torch.searchsorted(firsts, begins, right=True) - 1]
    numbers: dict[tuple[int, ...], int] = {}
    read = [
        numbers.setdefault(tuple(ids[first:begin].tolist()), len(numbers))
        for first, begin in zip(firsts.tolist(), begins.tolist(), strict=True)
    ]
    return torch.tensor(read, dtype=torch.int64)[turn_numbers(experience)]


def add_advantages(experience: Batch, estimator: Estimator, config: AlgorithmConfig) -> None:
    """Fill `advantages` and `returns` from `rewards`, and from other columns that the estimator reads, if they exist.

    The estimator sees the rows of `compared_rows` alone; tokens of other rows have advantage and return 0. Raises
    ConfigError when the estimator, which may be the user's, does not return two finite numbers per token.
    """
    reads = ESTIMATORS.traits(config.adv_estimator, EstimatorTraits()).reads
    if "observations" in reads:
        experience.add(observations=experience.per_sampled_token(observation_numbers(experience)))
    compared = compared_rows(experience, "groups" in reads)
    on_tokens = spread(compared, experience.num_sampled)
    samples = samples_of(experience, compared)
    estimates = estimator(samples, config) if compared.any() else (samples.rewards, samples.rewards)
    for name, values in zip(("advantages", "returns"), estimates, strict=True):
        if values.shape != samples.rewards.shape or not values.isfinite().all():
            raise ConfigError(
                f"algorithm.adv_estimator={config.adv_estimator} must return finite {name} of shape "
                f"{list(samples.rewards.shape)}, one per response token; it returned {list(values.shape)}, "
                f"{int(values.isfinite().sum())} of them finite"
            )
        column = values.new_zeros(len(on_tokens)).masked_scatter(on_tokens, values)
        experience.add(**{name: experience.per_sampled_token(column)})


def compared_rows(experience: Batch, in_groups: bool) -> torch.Tensor:
    """Return bool [B]: the rows from which advantages are estimated.

    An episode that failed has no score, and is none of them. in_groups: nor is an episode whose peers all failed,
    since nothing is left to compare it with.
    """
    rows = torch.ones(len(experience), dtype=torch.bool)
    for name in ("failed", "lost_peers") if in_groups else ("failed",):
        if name in experience:
            rows &= ~experience[name]
    return rows


def samples_of(experience: Batch, rows: torch.Tensor) -> Samples:
    """Return the columns that estimators read, of the `rows` bool [B]; a column that does not exist is None."""
    lengths = experience.num_sampled
    on_tokens = spread(rows, lengths)

    def flat(name: str) -> torch.Tensor | None:
        return experience.flat(name)[on_tokens] if name in experience else None

    def of_rows(name: str) -> torch.Tensor | None:
        return experience[name][rows] if name in experience else None

    return Samples(
        rewards=experience.flat("rewards")[on_tokens],
        lengths=lengths[rows],
        groups=experience["groups"][rows],
        scores=experience["scores"][rows],
        given_totals=of_rows("totals"),
        values=flat("old_values"),
        greedy_scores=of_rows("greedy_scores"),
        components=of_rows("components"),
        turns=turn_numbers(experience)[on_tokens],
        observations=flat("observations"),
        old_log_probs=flat("old_log_probs"),
        ref_log_probs=flat("ref_log_probs"),
        sum_pi_squared=flat("sum_pi_squared"),
        rollout_weights=flat("rollout_weights"),
    )


def leave_out_truncated(experience: Batch) -> None:
    """Set `kept` to 0 on all tokens of truncated responses.

    DAPO's overlong filtering: Yu et al., arXiv:2503.14476, section 3.4. Needs `truncated`.
    """
    whole = spread((~experience["truncated"]).float(), experience.num_sampled)
    kept = experience.flat("kept") * whole if "kept" in experience else whole
    experience.add(kept=experience.per_sampled_token(kept))


def highest_entropy(entropy: torch.Tensor, share: float) -> torch.Tensor:
    """entropy float32 [B, (R)] of a step's tokens -> 1 on the `share` of them that have the highest, else 0.

    Wang et al., "Beyond the 80/20 Rule", arXiv:2506.01939. Of n tokens, in all responses together, 1 + floor(share
    (n - 1)) are chosen, and all that have the entropy of the last of them.
    """
    values, chosen = entropy.values(), torch.zeros_like(entropy.values())
    if len(values):
        chosen = (values >= values.topk(1 + int(share * (len(values) - 1))).values[-1]).float()
    return ragged_from_lengths(chosen, row_lengths(entropy))


def add_rollout_correction(experience: Batch, config: RolloutCorrectionConfig) -> dict[str, float]:
    """Fill `rollout_weights` and `kept` as configured, from both log-probs of the sampled tokens; returns metrics.

    Nothing of it with `bypass_mode`: then the policy loss does it, with the log-probs of its own.
    """
    if config.bypass_mode:
        return {}
    weights, kept, metrics = correct_rollout(
        experience.flat("old_log_probs"), experience.flat("rollout_log_probs"), experience.num_sampled, config
    )
    for name, values in (("rollout_weights", weights), ("kept", kept)):
        if values is not None:
            experience.add(**{name: experience.per_sampled_token(values)})
    return metrics
