"""GiGPO: agents learn from other episodes, and from other turns behind the same observation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.config.algorithm_keys import AlgorithmConfig
from megatron_rl.config.declarations import estimator
from megatron_rl.losses.advantages import rewards_to_go
from megatron_rl.losses.estimators import Samples
from megatron_rl.losses.group_advantages import normalised, numbered
from megatron_rl.losses.rows import spread

if TYPE_CHECKING:
    from torch import Tensor


@estimator(
    "gigpo",
    reads=("groups", "observations"),
    keys=("gigpo_step_advantage_w", "gamma", "turn_rewards", "norm_adv_by_std_in_grpo"),
)
def estimate_gigpo(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """`grpo` of the episode + w * `grpo` of the turn's discounted reward to go, among turns of the group that read the
    same.

    GiGPO: Feng et al., arXiv:2505.10978; w is `gigpo_step_advantage_w`. What a turn has read is the observation right
    before it, or the prompt; gamma discounts by turns. A turn that read what no other one of its group has read adds
    nothing. `norm_adv_by_std_in_grpo=false`: without the division by standard deviations. Rewards to go that differ by
    rounding alone are equal.
    """
    import torch

    by_std = config.norm_adv_by_std_in_grpo
    turns, turn_of_token = samples.by_turns()
    to_go, summands = (
        rewards_to_go(turns.padded(rewards), turns.mask, config.gamma)[turns.mask]
        for rewards in (turns.rewards, turns.rewards.abs())
    )
    anchors = spread(samples.groups, turns.lengths)
    if turns.observations is not None:
        _, anchors = torch.stack((anchors, turns.observations)).unique(dim=1, return_inverse=True)
    index, sizes = numbered(anchors)
    of_turns = normalised(to_go, anchors, by_std, summands).where(sizes[index] > 1, 0.0)
    of_episodes = spread(normalised(samples.totals, samples.groups, by_std), samples.lengths)
    advantages = of_episodes + config.gigpo_step_advantage_w * of_turns[turn_of_token]
    return advantages, advantages
