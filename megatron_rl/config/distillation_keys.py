"""Keys of teachers, from whose distributions the actor learns on its own answers. Names are verl's. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Le

from megatron_rl.config.constraints import OURS, AtMost, FilePath, NotNegative, OneOf, Or, PassTokens, Size
from megatron_rl.config.declarations import DISTILLATION_LOSSES
from megatron_rl.config.megatron import MegatronConfig, follow_actor_in_all, follows
from megatron_rl.config.trainer import GLOBAL_POOL

SELF = "self"
"""In place of a teacher's folder: the actor, as it is in this step."""


@dataclass
class TeacherConfig:
    """A group in `distillation.teacher_models`."""

    key: str | None = None
    """The prompts that it teaches: those with this value in the column of distillation.teacher_key; null: all, where it
    is the only teacher."""
    model_path: FilePath | None = None
    """Hugging Face folder of a model with the actor's tokenizer | self: the actor itself, which reads prompt_key."""
    prompt_key: Annotated[str | None, OURS] = None
    """Entry of extra_info with the prompt that the teacher reads in place of the policy's, such as one with a
    demonstration: text, or a list of messages. null: the policy's own."""
    max_prompt_length: Annotated[Size, OURS] = follows("data.max_prompt_length")
    """Tokens of that prompt at most."""
    pool: Annotated[str, OURS] = GLOBAL_POOL
    """The pool whose ranks hold the teacher; of `self` the actor's."""
    use_remove_padding: Annotated[bool, OURS] = follows("actor_rollout_ref.model.use_remove_padding")
    """Pack the teacher's sequences end to end instead of padding each to the longest of its micro-batch."""
    log_prob_micro_batch_size_per_gpu: Annotated[Size, OURS] = follows(
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
    )
    """Samples per forward pass of the teacher, where not dynamic."""
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
    """What is compared. The sampled tokens alone: kl (k1) | abs | mse (k2) | low_var_kl (k3); the top-k of one model:
    forward_kl_topk | reverse_kl_topk; the whole vocabulary: forward_kl | reverse_kl | mixed_kl | jsd."""
    topk: Annotated[int, Ge(1), AtMost(2**15)] = 128
    """Tokens of the teacher, or with reverse_kl_topk of the actor, that a loss over the top-k compares."""
    topk_tail: Annotated[bool, OURS] = True
    """Compare all other tokens together as one more, so that the loss and its gradient are 0 where both models agree;
    false is verl's loss, in which mass outside of the top-k has no price."""
    use_task_rewards: bool = True
    """false: the rewards are measured and train nothing."""
    task_loss_coef: Annotated[NotNegative, OURS] = 1.0
    """With use_task_rewards: factor of the policy loss."""
    distillation_loss_coef: NotNegative = 1.0
    """With use_task_rewards: factor of the distillation loss; without them it is 1."""
    loss_max_clamp: Annotated[float | None, Or(None, "no bound"), Ge(0)] = 10.0
    """Bound of the loss of a token that is estimated from the sampled tokens or the top-k, of either sign."""
    log_prob_min_clamp: Annotated[float | None, Or(None, "no bound"), Le(0)] = -10.0
    """Bound of the log-probs in a loss over the top-k, from below."""
    use_policy_gradient: bool = True
    """true: the negative loss of a token is a part of its advantage, which any policy loss trains, for estimates from
    sampled tokens alone | false: the loss is differentiated."""
    mixed_kl_weight: Annotated[float, Ge(0), Le(1), OURS] = 0.5
    """mixed_kl: share of the reverse KL."""
    beta: Annotated[float, Ge(0), Le(1), OURS] = 0.5
    """jsd: the teacher's share in the mixture that both are compared with; at 0 it is the forward KL, at 1 the
    reverse."""
    temperature: Annotated[float | None, Or(None, "that of the rollout"), Ge(0.01), OURS] = None
    """Both models' logits are divided by it, in losses over the whole vocabulary; null: rollout.temperature, which
    all other losses have."""


@dataclass
class DistillationConfig:
    enabled: bool = False
    """Have teachers, and learn from them."""
    teacher_key: str = follows("data.reward_fn_key")
    """The column of a prompt that chooses its teacher: data.reward_fn_key, which every prompt has."""
    teacher_models: dict[str, TeacherConfig] = field(default_factory=dict)
    """Teachers by names of the user's own."""
    distillation_loss: DistillationLossConfig = field(default_factory=DistillationLossConfig)
