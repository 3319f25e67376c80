"""Keys of on-policy distillation: the actor learns from teachers on its own responses. Names are verl's. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Le

from megatron_rl.config.constraints import OURS, AtMost, FilePath, NotNegative, OneOf, Or, PassTokens, Size
from megatron_rl.config.declarations import DISTILLATION_LOSSES
from megatron_rl.config.megatron import MegatronConfig, follow_actor_in_all, follows
from megatron_rl.config.trainer import GLOBAL_POOL

SELF = "self"
"""In place of a teacher's folder: the actor with its weights of this step."""


@dataclass
class TeacherConfig:
    """A group in `distillation.teacher_models`."""

    key: str | None = None
    """The prompts of this teacher: those with this value in the column distillation.teacher_key; null: all prompts, if
    it is the only teacher."""
    model_path: FilePath | None = None
    """Hugging Face folder of a teacher with the actor's tokenizer | self: the actor itself, which reads prompt_key."""
    prompt_key: Annotated[str | None, OURS] = None
    """Entry of extra_info with the prompt that the teacher reads in place of the policy's prompt, such as one with a
    demonstration: text, or a list of messages. null: the policy's prompt."""
    max_prompt_length: Annotated[Size, OURS] = follows("data.max_prompt_length")
    """Largest number of tokens of the teacher's prompt."""
    pool: Annotated[str, OURS] = GLOBAL_POOL
    """The pool whose ranks have the teacher. With model_path=self and another pool than the actor's it gets the actor's
    weights after each step."""
    use_remove_padding: Annotated[bool, OURS] = follows("actor_rollout_ref.model.use_remove_padding")
    """Pack the teacher's sequences end to end instead of padding each to the longest of its micro-batch."""
    log_prob_micro_batch_size_per_gpu: Annotated[Size, OURS] = follows(
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
    )
    """Samples per forward pass of the teacher, where log_prob_use_dynamic_bsz is false."""
    log_prob_use_dynamic_bsz: Annotated[bool, OURS] = follows("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz")
    """Fill the teacher's micro-batches by tokens instead of by samples."""
    log_prob_max_token_len_per_gpu: Annotated[PassTokens, OURS] = follows(
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"
    )
    """Tokens per forward pass of the teacher, where log_prob_use_dynamic_bsz is true."""
    megatron: Annotated[MegatronConfig, OURS] = field(default_factory=follow_actor_in_all)


@dataclass
class DistillationLossConfig:
    loss_mode: Annotated[str, OneOf(DISTILLATION_LOSSES)] = "k3"
    """Divergence between actor and teacher. From sampled tokens only: kl (k1) | abs | mse (k2) | low_var_kl (k3); over
    the top-k of one model: forward_kl_topk | reverse_kl_topk; over the whole vocabulary: forward_kl | reverse_kl |
    mixed_kl | jsd."""
    topk: Annotated[int, Ge(1), AtMost(2**15)] = 128
    """k of the top-k losses: number of likeliest tokens of the teacher, or with reverse_kl_topk of the actor."""
    topk_tail: Annotated[bool, OURS] = True
    """Top-k losses: compare all other tokens together as one more token, so that loss and gradient are 0 where both
    models agree; false: verl's loss, which ignores probability outside of the top-k."""
    use_task_rewards: bool = True
    """Train with the rewards, too; false: rewards are only reported."""
    task_loss_coef: Annotated[NotNegative, OURS] = 1.0
    """With use_task_rewards: weight of the policy loss."""
    distillation_loss_coef: NotNegative = 1.0
    """With use_task_rewards: weight of the distillation loss; without them its weight is 1."""
    loss_max_clamp: Annotated[float | None, Or(None, "no bound"), Ge(0)] = 10.0
    """Losses from sampled tokens or top-k: the loss of a token is clamped to +- this value; null: no bound."""
    log_prob_min_clamp: Annotated[float | None, Or(None, "no bound"), Le(0)] = -10.0
    """Top-k losses: log-probs are clamped from below to this value; null: no bound."""
    use_policy_gradient: bool = True
    """true: the negative loss of a token is added to its advantage, and the policy loss trains it (losses from sampled
    tokens only) | false: the loss is differentiated directly."""
    mixed_kl_weight: Annotated[float, Ge(0), Le(1), OURS] = 0.5
    """loss_mode=mixed_kl: share of the reverse KL; the rest is the forward KL."""
    beta: Annotated[float, Ge(0), Le(1), OURS] = 0.5
    """loss_mode=jsd: share of the teacher in the mixture that both are compared with; 0 is the forward KL, 1 the
    reverse KL."""
    temperature: Annotated[float | None, Or(None, "that of the rollout"), Ge(0.01), OURS] = None
    """Losses over the whole vocabulary: temperature of both models' logits; null: rollout.temperature, which all other
    losses use."""


@dataclass
class DistillationConfig:
    enabled: bool = False
    """Turn on on-policy distillation from distillation.teacher_models."""
    teacher_key: str = follows("data.reward_fn_key")
    """Column of a prompt that selects its teacher."""
    teacher_models: dict[str, TeacherConfig] = field(default_factory=dict)
    """Teachers, by names that you choose."""
    distillation_loss: DistillationLossConfig = field(default_factory=DistillationLossConfig)
