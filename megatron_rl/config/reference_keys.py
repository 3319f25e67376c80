"""Keys of the reference, `actor_rollout_ref.ref`: where it is, how it scores, and whether it follows the policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Gt, Le

from megatron_rl.config.constraints import OURS, PassTokens, Size
from megatron_rl.config.megatron import MegatronConfig, follow_actor_in_all, follows


@dataclass
class RefConfig:
    """The reference of a KL, and of `dpo.reference=on_the_fly`."""

    pool: Annotated[str, OURS] = "${actor_rollout_ref.actor.pool}"
    """The pool whose ranks have the frozen reference model."""
    log_prob_micro_batch_size_per_gpu: Size = follows("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu")
    """Samples per forward pass of the reference, where log_prob_use_dynamic_bsz is false."""
    log_prob_use_dynamic_bsz: bool = follows("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz")
    """Fill the reference's micro-batches by tokens instead of by samples."""
    log_prob_max_token_len_per_gpu: PassTokens = follows("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu")
    """Tokens per forward pass of the reference, where log_prob_use_dynamic_bsz is true."""
    sync_ref_model: Annotated[bool, OURS] = False
    """Move the reference (TR-DPO): every ref_model_sync_steps steps it becomes a * policy + (1 - a) * reference, with a
    = ref_model_mixup_alpha."""
    ref_model_mixup_alpha: Annotated[float, Gt(0), Le(1), OURS] = 0.6
    """sync_ref_model: share of the policy in the new reference; 1: the reference becomes the policy."""
    ref_model_sync_steps: Annotated[Size, OURS] = 512
    """sync_ref_model: training steps from one refresh of the reference to the next."""
    megatron: MegatronConfig = field(default_factory=follow_actor_in_all)

    def is_refreshed_after(self, step: int) -> bool:
        """Whether the reference moves to the policy once this step is taken."""
        return self.sync_ref_model and step % self.ref_model_sync_steps == 0
