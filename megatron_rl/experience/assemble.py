"""Turn prompts, generations and scores into experience, and experience into rewards and advantages."""

from __future__ import annotations

import torch

from megatron_rl.losses.advantages import gae, whiten
from megatron_rl.losses.kl import kl_k1
from megatron_rl.records import (
    Experience,
    Generations,
    Prompts,
    from_padded,
    ragged,
    ragged_from_lengths,
    row_lengths,
    to_padded,
)


def assemble(prompts: Prompts, generations: Generations) -> Experience:
    """Join each prompt row with its response; the other fields are filled as they are computed."""
    rows = zip(prompts.prompt_ids.unbind(), generations.response_ids.unbind(), strict=True)
    return Experience(
        input_ids=ragged([torch.cat(pair) for pair in rows]),
        response_lengths=row_lengths(generations.response_ids),
        rollout_log_probs=generations.rollout_log_probs,
        batch_size=prompts.batch_size,
    )


def add_rewards(experience: Experience, kl_coef: float) -> torch.Tensor:
    """Fill `rewards`: -kl_coef * (old - reference log-prob) on every token, plus the score on the last one.

    Needs `scores`, `old_log_probs` and `ref_log_probs`. Returns the KL to the reference, a scalar for the metrics: the
    mean over sequences of their mean per token, as verl reports it. Raises ValueError for an empty response, which has
    no token to carry its score.
    """
    lengths = experience.response_lengths
    if int(lengths.min()) < 1:
        raise ValueError(f"row {int(lengths.argmin())} has an empty response: there is no token to give its score to")
    kl = kl_k1(experience.old_log_probs.values(), experience.ref_log_probs.values())
    rewards = -kl_coef * kl
    rewards[lengths.cumsum(0) - 1] += experience.scores
    experience.rewards = ragged_from_lengths(rewards, lengths)
    return torch.stack([row.mean() for row in kl.split(lengths.tolist())]).mean()


def add_advantages(experience: Experience, gamma: float, lam: float) -> None:
    """Fill `advantages` (whitened over all tokens of the batch) and `returns` from `rewards` and `old_values`."""
    lengths = experience.response_lengths
    longest = int(lengths.max())
    mask = torch.arange(longest)[None] < lengths[:, None]
    rewards, values = to_padded(experience.rewards, longest), to_padded(experience.old_values, longest)
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    experience.returns = from_padded(returns, lengths)
    experience.advantages = ragged_from_lengths(whiten(advantages[mask]), lengths)
