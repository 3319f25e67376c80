"""Keys of `algorithm`: estimators of advantages, the KL in the reward, groups that are sampled again. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt

from megatron_rl.config.constraints import (
    OURS,
    Count,
    FilePath,
    Nearest,
    NotNegative,
    OneOf,
    Positive,
    Size,
    UnitInterval,
)
from megatron_rl.config.correction import RolloutCorrectionConfig
from megatron_rl.config.declarations import KL_ESTIMATES


@dataclass
class UserFileConfig:
    path: FilePath | None = None
    """Python file with your own function (a policy loss, an advantage estimator), or with the scorer class of that
    name."""


@dataclass
class KlCtrlConfig:
    type: Annotated[str, OneOf(("fixed", "adaptive"))] = "fixed"
    """Weight of the KL penalty in the reward: fixed | adaptive: raised or lowered until the measured KL is
    target_kl."""
    kl_coef: NotNegative = 0.001
    """Weight of the KL penalty in the reward; with type=adaptive its first value."""
    target_kl: Positive = 0.1
    """type=adaptive: KL per token that the weight is steered to."""
    horizon: Size = 10000
    """type=adaptive: samples over which the weight changes; larger is slower."""


@dataclass
class FilterGroupsConfig:
    enable: bool = False
    """Dynamic sampling (DAPO): generate batches of data.gen_batch_size prompts until data.train_batch_size prompts have
    samples with different scores, and train on those."""
    metric: Annotated[str, OneOf(("score", "acc"))] = "score"
    """The value that must differ within a group: score | acc: the accuracy that the reward function returns (its score
    if it returns none)."""
    max_num_gen_batches: Count = 10
    """Largest number of generated batches per step; then prompts with equal scores fill the batch. 0: no limit."""
    path: Annotated[FilePath | None, OURS] = None
    """Python file with a verdict of your own: (rows of a group, with scores) -> True: keep it. null: metric decides."""
    name: Annotated[str, OURS] = "keep_group"
    """The function in algorithm.filter_groups.path."""


@dataclass
class AlgorithmConfig:
    adv_estimator: str = "gae"
    """gae | grpo | grpo_passk | gdpo | gpg | rloo | opo | max_rl | optimal_token_baseline | tir_optimal_token_baseline
    | gigpo | online_dpo | reinforce_plus_plus | reinforce_plus_plus_baseline | remax | grpo_vectorized: as grpo |
    rloo_vectorized: as rloo | the name of a function in custom_adv_estimator.path. Only gae needs a critic."""
    custom_adv_estimator: Annotated[UserFileConfig, OURS] = field(default_factory=UserFileConfig)
    norm_adv_by_std_in_grpo: bool = True
    """grpo, grpo_passk, gdpo, gigpo: divide advantages by the standard deviation of the group's scores; false:
    Dr.GRPO."""
    scale_rewards: Annotated[str, OneOf(("group", "batch")), OURS] = "group"
    """grpo: the standard deviation of norm_adv_by_std_in_grpo is that of a group | batch: of all responses of the step
    (LitePPO)."""
    gdpo_reward_keys: list[str] | None = None
    """gdpo: entries of the reward function's dict that are normalised separately; score: its own, rm_score: the
    reward model's, overlong_reward: the overlong penalty."""
    gdpo_reward_weights: list[float] | None = None
    """gdpo: weight of each entry of gdpo_reward_keys; null: 1 each."""
    gigpo_step_advantage_w: Annotated[float, Ge(0), OURS] = 1.0
    """gigpo: weight of the step-level advantage (among turns with the same context), added to the episode-level one."""
    online_dpo_beta: Annotated[Positive, OURS] = 0.1
    """online_dpo: DPO's beta; larger keeps the policy closer to the reference."""
    gamma: UnitInterval = 1.0
    """Discount factor per token (gae, reinforce_plus_plus) or per turn (gigpo)."""
    lam: UnitInterval = 1.0
    """Lambda of generalised advantage estimation (gae)."""
    adaptive_lam_alpha: Annotated[float | None, Gt(0), Nearest(0.05), OURS] = None
    """gae: length-adaptive lambda = 1 - 1 / (alpha l) for the advantages of a response of l tokens; returns keep lam.
    VAPO has alpha 0.05 and lam 1. null: lam for both."""
    gae_timestep: Annotated[str, OneOf(("token", "turn")), OURS] = "token"
    """gae: what a time step is. token | turn: a turn of the policy, with the value of its first token and one
    advantage."""
    turn_rewards: Annotated[bool, OURS] = False
    """gae, reinforce_plus_plus, remax, gigpo: place the environment's reward for a turn on the last token of that turn;
    false: the whole score is on the last token of the episode."""
    mask_truncated_completions: Annotated[bool, OURS] = False
    """Leave responses that were cut off at data.max_response_length out of the losses of actor and critic; they still
    count in advantages."""
    use_kl_in_reward: bool = False
    """Subtract kl_coef * KL to the reference policy from every token's reward."""
    kl_penalty: Annotated[str, OneOf(KL_ESTIMATES)] = "kl"
    """Estimator of the KL in the reward: kl (k1) | abs | mse (k2) | low_var_kl (k3); a + after it makes no difference
    there."""
    kl_ctrl: KlCtrlConfig = field(default_factory=KlCtrlConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
