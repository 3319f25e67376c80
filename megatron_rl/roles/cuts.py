"""How the passes of every role are cut into micro-batches, as configured."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import AutoConfig

from megatron_rl.balance import SequenceWork
from megatron_rl.config.schema import RunConfig
from megatron_rl.experience.micro_batches import MicroBatching
from megatron_rl.model.families import ModelShape


def sequence_work(model_path: str) -> SequenceWork:
    """What a sequence costs under the model in a Hugging Face folder."""
    return SequenceWork(ModelShape.from_hf(AutoConfig.from_pretrained(model_path).to_dict()).attention_parity)


@dataclass(frozen=True)
class Cuts:
    """One `MicroBatching` for every kind of pass."""

    update_actor: MicroBatching
    log_probs: MicroBatching
    ref_log_probs: MicroBatching
    update_critic: MicroBatching
    values: MicroBatching
    rm_scores: MicroBatching

    @classmethod
    def configured(cls, config: RunConfig) -> Cuts:
        """Read the model's config.json and the keys of all roles."""
        shared, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
        longest = config.data.max_prompt_length + config.data.max_response_length
        actor, rollout, ref = shared.actor, shared.rollout, shared.ref
        work = sequence_work(shared.model.path)

        def cut(num_rows: int, is_dynamic: bool, max_tokens: int, remove_padding: bool) -> MicroBatching:
            return MicroBatching(num_rows, max_tokens if is_dynamic else None, remove_padding, work)

        packed = shared.model.use_remove_padding
        log_prob_rows, ref_rows = rollout.log_prob_micro_batch_size_per_gpu, ref.log_prob_micro_batch_size_per_gpu
        return cls(
            cut(actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu, packed),
            cut(log_prob_rows, rollout.log_prob_use_dynamic_bsz, rollout.log_prob_max_token_len_per_gpu, packed),
            cut(ref_rows, ref.log_prob_use_dynamic_bsz, ref.log_prob_max_token_len_per_gpu, packed),
            cut(
                critic.ppo_micro_batch_size_per_gpu,
                critic.use_dynamic_bsz,
                critic.ppo_max_token_len_per_gpu,
                critic.model.use_remove_padding,
            ),
            cut(
                critic.forward_micro_batch_size_per_gpu,
                critic.use_dynamic_bsz,
                critic.forward_max_token_len_per_gpu,
                critic.model.use_remove_padding,
            ),
            cut(
                reward.micro_batch_size_per_gpu,
                reward.use_dynamic_bsz,
                max(reward.forward_max_token_len_per_gpu, longest + 1),  # it reads one token more
                reward.model.use_remove_padding,
            ),
        )
