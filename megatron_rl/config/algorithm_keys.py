"""Keys of `algorithm`: estimators of advantages, the KL in the reward, groups that are drawn again. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt

from megatron_rl.config.constraints import OURS, Count, Nearest, NotNegative, OneOf, Positive, Size, UnitInterval
from megatron_rl.config.correction import RolloutCorrectionConfig
from megatron_rl.config.declarations import KL_ESTIMATES
from megatron_rl.config.user_files import UserFileConfig


@dataclass
class KlCtrlConfig:
    type: Annotated[str, OneOf(("fixed", "adaptive"))] = "fixed"
    """fixed | adaptive: the weight follows the measured KL towards target_kl."""
    kl_coef: NotNegative = 0.001
    """Weight of the KL penalty; of the adaptive one the first."""
    target_kl: Positive = 0.1
    """KL per token that the adaptive weight aims at."""
    horizon: Size = 10000
    """Samples over which the adaptive weight changes; the larger the slower."""


@dataclass
class FilterGroupsConfig:
    enable: bool = False
    """Dynamic sampling: draw batches of data.gen_batch_size prompts until data.train_batch_size of them have samples
    with different scores, and train on those."""
    metric: Annotated[str, OneOf(("score", "acc"))] = "score"
    """The number that must differ: score | acc, the accuracy that the rule reports (its score if it reports none)."""
    max_num_gen_batches: Count = 10
    """Batches per step at most, then it is filled up with prompts whose samples have equal scores; 0: no limit."""


@dataclass
class AlgorithmConfig:
    adv_estimator: str = "gae"
    """gae | grpo | grpo_passk | gdpo | gpg | rloo | opo | max_rl | optimal_token_baseline |
    tir_optimal_token_baseline | gigpo | online_dpo | reinforce_plus_plus | reinforce_plus_plus_baseline | remax |
    grpo_vectorized: grpo | rloo_vectorized: rloo | the name of a function in custom_adv_estimator.path. Only gae needs
    a critic."""
    custom_adv_estimator: Annotated[UserFileConfig, OURS] = field(default_factory=UserFileConfig)
    norm_adv_by_std_in_grpo: bool = True
    """Divide GRPO's advantages by the standard deviation of the group; false is Dr.GRPO. Also grpo_passk's, gdpo's,
    gigpo's."""
    scale_rewards: Annotated[str, OneOf(("group", "batch")), OURS] = "group"
    """grpo: that standard deviation is of the answers of a group | batch: of all answers of the step (LitePPO)."""
    gdpo_reward_keys: list[str] | None = None
    """gdpo: which numbers of the reward function's dict are normalised apart."""
    gdpo_reward_weights: list[float] | None = None
    """gdpo: what each of them counts; null: 1."""
    gigpo_step_advantage_w: Annotated[float, Ge(0), OURS] = 1.0
    """gigpo: what the advantage among turns that have read the same counts, beside that among episodes."""
    online_dpo_beta: Annotated[Positive, OURS] = 0.1
    """online_dpo: DPO's beta, how strongly the policy is held to the reference."""
    gamma: UnitInterval = 1.0
    """Discount per token, of gae and reinforce_plus_plus; gigpo: per turn."""
    lam: UnitInterval = 1.0
    """GAE's lambda."""
    adaptive_lam_alpha: Annotated[float | None, Gt(0), Nearest(0.05), OURS] = None
    """gae: give the advantages of an answer of l tokens lambda = 1 - 1 / (alpha l), and returns lam (VAPO has alpha
    0.05 and lam 1); null: lam for both."""
    gae_timestep: Annotated[str, OneOf(("token", "turn")), OURS] = "token"
    """gae: a time step is a token | a turn of the policy, with the value of its first token and one advantage."""
    turn_rewards: Annotated[bool, OURS] = False
    """gae, reinforce_plus_plus, remax and gigpo: the environment's reward for a turn is on that turn's last token;
    false: the whole score is on the last token of the episode."""
    mask_truncated_completions: Annotated[bool, OURS] = False
    """Leave answers that reached data.max_response_length without an end out of the losses of actor and critic; they
    still count in advantages."""
    use_kl_in_reward: bool = False
    """Subtract kl_coef * KL to the reference policy from every token's reward."""
    kl_penalty: Annotated[str, OneOf(KL_ESTIMATES)] = "kl"
    """How that KL is estimated: kl (k1) | abs | mse (k2) | low_var_kl (k3); a + after it changes no reward."""
    kl_ctrl: KlCtrlConfig = field(default_factory=KlCtrlConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
