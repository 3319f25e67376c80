"""Arguments and results of advantage estimators, and the estimators of tokens; those of groups have files of their own.

Legend: B responses, T sampled tokens of all responses, packed end to end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_rl.config.algorithm_keys import AlgorithmConfig
from megatron_rl.config.declarations import ESTIMATORS, estimator
from megatron_rl.config.user_functions import load_function
from megatron_rl.losses.advantages import gae, rewards_to_go, whiten
from megatron_rl.losses.rows import spread, total_rows

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Samples:
    """The responses of one step, as estimators read them: their sampled tokens alone, turn after turn.

    rewards: float [T], the score of a response on its last token, minus KL penalties where they enter the reward.
    lengths: int64 [B]; a response may have no token. groups: int64 [B], equal for the responses to one prompt.
    scores: float [B], without penalties. given_totals: float [B], the scores minus each row's penalties, if they are
    known: sums of `rewards` differ from them by rounding, which a small standard deviation would scale up.
    The other fields are None unless the estimator reads them (`EstimatorTraits`), or the run has them.
    values: float [T], of the critic. greedy_scores: float [B], of the greedy response to each response's prompt.
    components: float [B, K], the numbers that `algorithm.gdpo_reward_keys` names.
    old_log_probs, ref_log_probs: float [T], of the sampled tokens under policy and reference. sum_pi_squared: float
    [T], the sum of squared probabilities over the vocabulary. rollout_weights: float [T], the importance weights of the
    rollout's samples.
    turns: int64 [T], the number of each token's turn, counted over all responses; None: a response is one turn.
    observations: int64 [T], equal for tokens whose turns have read the same tokens since the turn before.
    """

    rewards: Tensor
    lengths: Tensor
    groups: Tensor
    scores: Tensor
    values: Tensor | None = None
    greedy_scores: Tensor | None = None
    components: Tensor | None = None
    old_log_probs: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    rollout_weights: Tensor | None = None
    turns: Tensor | None = None
    observations: Tensor | None = None
    ref_log_probs: Tensor | None = None
    given_totals: Tensor | None = None

    @property
    def totals(self) -> Tensor:
        """float [B]: the sum of each response's rewards; the score of a response without a token, so that its group
        knows it."""
        if self.given_totals is not None:
            return self.given_totals
        return total_rows(self.rewards, self.lengths, self.scores)

    def by_turns(self) -> tuple[Samples, Tensor]:
        """(the same responses with a turn in place of each token, int64 [T]: the turn of each token).

        A turn has the sum of its tokens' rewards, and value and observation of its first token.
        """
        import torch

        rows = torch.repeat_interleave(self.lengths)
        _, turns, sizes = (rows if self.turns is None else self.turns).unique_consecutive(
            return_inverse=True, return_counts=True
        )
        first = sizes.cumsum(0) - sizes
        rewards = self.rewards.new_zeros(len(sizes)).index_add(0, turns, self.rewards)
        lengths = rows[first].bincount(minlength=len(self.lengths))
        values, read = (None if column is None else column[first] for column in (self.values, self.observations))
        return replace(self, rewards=rewards, values=values, observations=read, lengths=lengths, turns=None), turns

    @property
    def mask(self) -> Tensor:
        """bool [B, R]: real tokens of right-padded rows."""
        import torch

        return torch.arange(int(self.lengths.max()))[None] < self.lengths[:, None]

    def padded(self, values: Tensor | None) -> Tensor:
        """values [T] as right-padded rows [B, R]. Raises ValueError for None."""
        mask, values = self.mask, required(values)
        dense = values.new_zeros(mask.shape)
        dense[mask] = values
        return dense

    def on_tokens(self, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """(advantages, returns), both the advantages [B] of responses on every token [T]."""
        tokens = spread(advantages, self.lengths)
        return tokens, tokens


def required(field: Tensor | None) -> Tensor:
    """The field of `Samples`. Raises ValueError for None."""
    if field is None:
        raise ValueError(
            "this estimator needs samples with the critic's values, greedy_scores, components, or sum_pi_squared"
        )
    return field


Estimator = Callable[[Samples, AlgorithmConfig], tuple["Tensor", "Tensor"]]
"""(samples, algorithm's keys) -> (advantages [T], returns [T]). Returns are what a critic learns to predict."""


def load_estimator(config: AlgorithmConfig) -> Estimator:
    """The configured estimator, built in or from the user's file. Raises ConfigError when the file does not have it."""
    name, path = config.adv_estimator, config.custom_adv_estimator.path
    if name in ESTIMATORS or path is None:
        return ESTIMATORS[name].function
    return load_function(path, "algorithm.custom_adv_estimator.path", name, ("samples", "config"))


@estimator("gae", reads=("old_values",), keys=("gamma", "lam", "adaptive_lam_alpha", "gae_timestep", "turn_rewards"))
def estimate_gae(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation with a critic, whitened over all tokens of the batch; returns are not.

    Schulman et al., arXiv:1506.02438; see `advantages.gae`. With `adaptive_lam_alpha` advantages have lambda = max(0,
    1 - 1 / (alpha l)) in a response of l tokens, and returns keep `lam`: VAPO, Yue et al., arXiv:2504.05118. With
    `gae_timestep=turn` all tokens of a turn have its advantage and its return, and l counts turns.
    """
    turns = None
    if config.gae_timestep == "turn":
        samples, turns = samples.by_turns()
    mask, alpha = samples.mask, config.adaptive_lam_alpha
    rewards, values = samples.padded(samples.rewards), samples.padded(samples.values)
    advantages, returns = gae(rewards, values, mask, config.gamma, config.lam)
    if alpha is not None:
        lam = (1 - 1 / (alpha * samples.lengths.clamp(min=1))).clamp(min=0).to(rewards.dtype)
        advantages, _ = gae(rewards, values, mask, config.gamma, lam)
    per_step = (values[mask] if turns is None else values[mask][turns] for values in (advantages, returns))
    advantages, returns = per_step
    return whiten(advantages), returns


@estimator("reinforce_plus_plus", keys=("gamma", "turn_rewards"))
def estimate_reinforce_plus_plus(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Discounted rewards to go, whitened over all tokens of the batch.

    REINFORCE++: Hu et al., arXiv:2501.03262.
    """
    mask = samples.mask
    returns = rewards_to_go(samples.padded(samples.rewards), mask, config.gamma)[mask]
    return whiten(returns), returns


@estimator("remax", reads=("greedy_scores",), keys=("turn_rewards",))
def estimate_remax(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Rewards to go, without discount, minus the score of a greedy response, one more per prompt and step.

    ReMax: Li et al., arXiv:2310.10505.
    """
    mask = samples.mask
    returns = rewards_to_go(samples.padded(samples.rewards), mask, gamma=1.0)[mask]
    return returns - spread(required(samples.greedy_scores), samples.lengths), returns
