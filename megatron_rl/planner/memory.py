"""What each rank holds in every phase of a step, planned from the configuration and config.json alone.

Counted are the tensors the project owns, to the element (parameter, gradient and optimizer buffers, foreign stages, the
KV cache), activations from the layers' arithmetic, and estimates of what vLLM and CUDA take beside them. Sequences are
taken to be as long as they may get, and experts to be used evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.hybrid_engine.plan import covers_training
from megatron_rl.model.chunks import chunk_tokens
from megatron_rl.planner.activations import (
    CHUNKS_BACKWARD,
    CHUNKS_FORWARD,
    FP32,
    Block,
    LayerSizes,
    in_flight,
)
from megatron_rl.planner.recompute import Recompute
from megatron_rl.planner.run_models import PlannedModel, RunModels
from megatron_rl.planner.weights import TrainedWeights

PHASES = (
    *("init", "reshard", "generation", "rm_scores", "old_log_prob", "ref", "values"),
    *("update_critic", "update_actor", "save"),
)
Held = dict[str, int]
"""What is held -> bytes."""


@dataclass(frozen=True)
class StageMemory:
    """A rank of one pipeline stage: phase -> what it holds then."""

    pp_rank: int
    kind: str
    phases: dict[str, Held]

    def total(self, phase: str) -> int:
        """Bytes at the peak of a phase."""
        return sum(self.phases[phase].values())

    @property
    def worst_phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> int:
        """Bytes at the worst moment."""
        return self.total(self.worst_phase)


@dataclass(frozen=True)
class Passes:
    """How one role's pass is cut: its block, and how many of them a rank runs for one optimizer step."""

    block: Block
    num_blocks: int


def plan_stages(models: RunModels) -> list[StageMemory]:
    """One rank of every pipeline stage; the others of a stage hold the same up to rounding."""
    return [MemoryOfStage(models, pp_rank).planned() for pp_rank in range(models.grid.pp_size)]


def worst_of_stages(stages: Sequence[StageMemory]) -> dict[str, Held]:
    """Phase -> what the stage that needs most holds in it."""
    return {
        phase: max((stage.phases[phase] for stage in stages), key=lambda held: sum(held.values()))
        for phase in stages[0].phases
    }


class MemoryOfStage:
    """The arithmetic of one stage."""

    def __init__(self, models: RunModels, pp_rank: int) -> None:
        self.models = models
        self.pp_rank = pp_rank
        self.config = models.config
        self.is_last = pp_rank == models.grid.pp_size - 1
        self.is_first = pp_rank == 0

    def planned(self) -> StageMemory:
        """All phases that this run has."""
        held = self._trained("actor", self.models.actor_weights)
        if self.models.critic_weights is not None:
            held |= self._trained("critic", self.models.critic_weights)
        if self.models.has_reference:
            held["reference parameters"] = self.models.actor_weights.num_params(self.pp_rank) * self.models.element
        if self.models.reward_weights is not None:
            numel = self.models.reward_weights.num_params(self.pp_rank)
            held["reward model parameters"] = numel * self.models.element
        phases = {
            "init": {
                **{name: size for name, size in held.items() if not name.endswith("moments")},
                **self._rollout_memory(),
            },
            **self._generation_phases(held),
            "old_log_prob": held | self._forward(self.models.actor, self._log_prob_passes()),
        }
        if self.models.has_reference:
            phases["ref"] = held | self._forward(self.models.actor, self._ref_passes())
        if self.models.reward is not None:
            phases["rm_scores"] = held | self._forward(self.models.reward, self._rm_passes(), has_vocab=False)
        if self.models.critic is not None:
            critic, weights = self.models.critic, self.models.critic_weights
            phases["values"] = held | self._forward(critic, self._value_passes(), has_vocab=False)
            again = Recompute.of(self.config.critic.megatron)
            passes = self._critic_passes()
            phases["update_critic"] = held | self._update(critic, weights, passes, again, has_vocab=False)
        actor, weights = self.models.actor, self.models.actor_weights
        again = Recompute.of(self.config.actor_rollout_ref.actor.megatron)
        phases["update_actor"] = held | self._update(actor, weights, self._actor_passes(), again)
        phases["save"] = held | self._checkpoint_copy()
        kind = "only" if self.is_first and self.is_last else "first" if self.is_first else "middle"
        kind = "last" if self.is_last and not self.is_first else kind
        ordered = {name: phases[name] for name in PHASES if name in phases}
        return StageMemory(self.pp_rank, kind, ordered)

    # What stays

    def _trained(self, role: str, weights: TrainedWeights) -> Held:
        """Parameters in the model's dtype, gradients in float32; moments, and masters of bfloat16 weights, shared out
        over data-parallel ranks (ZeRO stage 1, Rajbhandari et al., arXiv:1910.02054)."""
        numel, share = weights.numel(self.pp_rank), weights.optimizer_share(self.pp_rank)
        masters = {} if self.models.element == FP32 else {f"{role} masters": share * FP32}
        return {
            f"{role} parameters": numel * self.models.element,
            f"{role} gradients": numel * FP32,
            f"{role} moments": share * 2 * FP32,
            **masters,
        }

    def _checkpoint_copy(self) -> Held:
        """What a save keeps until it is written. From a GPU it goes to host memory, which is not counted here; on a CPU
        megatron-core copies what is part of a larger tensor: all weights, and moments of several segments."""
        if self.config.trainer.device != "cpu":
            return {}
        copied = 0
        for weights in (self.models.actor_weights, self.models.critic_weights):
            if weights is None:
                continue
            numels = weights.shard_numels(self.pp_rank)
            for buffer in weights.buffers[self.pp_rank]:
                stacked = [name for name in buffer.names if len(weights.specs[name].tensor.segments) > 1]
                moments = sum(numels[name] for name in stacked) * 2 * FP32
                copied += (buffer.num_params * self.models.element + moments) // buffer.num_shares
        return {"checkpoint copy": copied}

    # Generation

    def _generation_phases(self, held: Held) -> dict[str, Held]:
        """Resting memory is away in both; after the exchange the training copy may go, and then the cache comes."""
        resting = self._resting(held)
        staying = {name: size for name, size in held.items() if name not in resting}
        foreign = self.models.foreign_bytes(self.pp_rank)
        exchange = staying | {"foreign stages": foreign, "exchange scratch": self.models.scratch_bytes(self.pp_rank)}
        dropped = {"actor parameters": 0} if self._drops_training() else {}
        cache = self.config.actor_rollout_ref.rollout.kv_cache_memory_bytes
        woken = staying | dropped | {"foreign stages": foreign, "KV cache": cache}
        reshard = max(exchange, woken, key=lambda moment: sum(moment.values()))
        return {"reshard": reshard, "generation": staying | dropped | self._rollout_memory()}

    def _resting(self, held: Held) -> set[str]:
        shared, critic = self.config.actor_rollout_ref, self.config.critic
        found: set[str] = set()
        for role, megatron in (("actor", shared.actor.megatron), ("critic", critic.megatron)):
            found |= {f"{role} {name}" for name in _resting_kinds(megatron)}
        if shared.ref.megatron.param_offload:
            found.add("reference parameters")
        if self.config.reward_model.megatron.param_offload:
            found.add("reward model parameters")
        return found & held.keys()

    def _drops_training(self) -> bool:
        if not self.config.actor_rollout_ref.rollout.drop_train_weights:
            return False
        exchange, number = self.models.exchange, self.models.members_of_stage(self.pp_rank)[0]
        return covers_training(exchange.plans[number], exchange.held[number])

    def _rollout_memory(self) -> Held:
        """vLLM's part. Its activations are an estimate: a step's tokens through one layer, and the logits of all
        sequences, gathered, in float32, with a copy for filtering and one for log-probs."""
        rollout, shape = self.config.actor_rollout_ref.rollout, self.models.actor.shape
        tp, routing = rollout.tensor_model_parallel_size, self.models.actor.routing
        columns = shape.ffn_size * (routing.experts_per_token if routing else 1) // tp
        heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size // tp
        # A step takes whole prompts at most, or one token of each sequence.
        tokens = min(rollout.max_num_batched_tokens, rollout.max_num_seqs * self.config.data.max_prompt_length)
        layer = tokens * (4 * shape.hidden_size + heads + 3 * columns) * self.models.element
        logits = 3 * rollout.max_num_seqs * shape.vocab_size * FP32
        return {
            "foreign stages": self.models.foreign_bytes(self.pp_rank),
            "KV cache": rollout.kv_cache_memory_bytes,
            "vLLM activations": layer + logits,
        }

    # Passes through the trainer

    def _passes(self, num_samples: int, rows: int, max_tokens: int | None, packed: bool) -> Passes:
        """The largest block of a rank's share of `num_samples` sequences of full length."""
        data = self.config.data
        length, response = data.max_prompt_length + data.max_response_length, data.max_response_length
        multiple = self.models.grid.tp_size if self.models.megatron.sequence_parallel else 1
        share = max(1, -(-num_samples // self.models.grid.dp_size))
        if max_tokens is not None:
            rows = max(1, max_tokens // length)
        rows = min(rows, share)
        tokens = rows * length
        tokens = -(-tokens // multiple) * multiple
        return Passes(Block(tokens, tokens, rows * response, packed), -(-share // rows))

    def _num_samples(self, mini_batch: int) -> int:
        return min(mini_batch, self.config.data.train_batch_size) * self.config.actor_rollout_ref.rollout.n

    def _actor_passes(self) -> Passes:
        actor, model = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.model
        limit = actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None
        samples = self._num_samples(actor.ppo_mini_batch_size)
        return self._passes(samples, actor.ppo_micro_batch_size_per_gpu, limit, model.use_remove_padding)

    def _critic_passes(self) -> Passes:
        critic = self.config.critic
        limit = critic.ppo_max_token_len_per_gpu if critic.use_dynamic_bsz else None
        samples, rows = self._num_samples(critic.ppo_mini_batch_size), critic.ppo_micro_batch_size_per_gpu
        return self._passes(samples, rows, limit, critic.model.use_remove_padding)

    def _log_prob_passes(self) -> Passes:
        shared = self.config.actor_rollout_ref
        rollout = shared.rollout
        limit = rollout.log_prob_max_token_len_per_gpu if rollout.log_prob_use_dynamic_bsz else None
        samples = self._num_samples(self.config.data.train_batch_size)
        return self._passes(samples, rollout.log_prob_micro_batch_size_per_gpu, limit, shared.model.use_remove_padding)

    def _ref_passes(self) -> Passes:
        shared = self.config.actor_rollout_ref
        limit = shared.ref.log_prob_max_token_len_per_gpu if shared.ref.log_prob_use_dynamic_bsz else None
        samples, rows = (
            self._num_samples(self.config.data.train_batch_size),
            shared.ref.log_prob_micro_batch_size_per_gpu,
        )
        return self._passes(samples, rows, limit, shared.model.use_remove_padding)

    def _value_passes(self) -> Passes:
        critic = self.config.critic
        limit = critic.forward_max_token_len_per_gpu if critic.use_dynamic_bsz else None
        samples = self._num_samples(self.config.data.train_batch_size)
        return self._passes(samples, critic.forward_micro_batch_size_per_gpu, limit, critic.model.use_remove_padding)

    def _rm_passes(self) -> Passes:
        reward = self.config.reward_model
        limit = reward.forward_max_token_len_per_gpu if reward.use_dynamic_bsz else None
        samples = self._num_samples(self.config.data.train_batch_size)
        return self._passes(samples, reward.micro_batch_size_per_gpu, limit, reward.model.use_remove_padding)

    def _layer(self, model: PlannedModel) -> LayerSizes:
        grid = self.models.grid
        sequence_parallel = self.models.megatron.sequence_parallel
        return LayerSizes.of(
            model.family,
            model.shape,
            model.routing,
            grid.tp_size,
            grid.expert_tp_size,
            sequence_parallel,
            self.models.element,
        )

    def _vocab_rows(self) -> int:
        multiple = self.models.vocab_multiple
        return -(-self.models.actor.shape.vocab_size // multiple) * multiple // self.models.grid.tp_size

    def _head(self, block: Block, num_chunks: int, has_vocab: bool) -> Held:
        """The logits that exist at once, and the hidden states of the scored tokens."""
        if not self.is_last or not has_vocab:
            return {}
        scored = block.response_tokens * self.models.actor.shape.hidden_size * self.models.element
        rows, hidden = self._vocab_rows(), self.models.actor.shape.hidden_size
        logits = min(chunk_tokens(hidden, rows), block.response_tokens) * rows * FP32
        return {"logits chunk": num_chunks * logits + scored}

    def _forward(self, model: PlannedModel, passes: Passes, has_vocab: bool = True) -> Held:
        """Nothing is kept but the block's hidden states: one layer at a time, then the head."""
        layer, block = self._layer(model), passes.block
        hidden = 2 * block.tokens * layer.hidden * layer.element
        head = self._head(block, CHUNKS_FORWARD, has_vocab)
        running = layer.transient_bytes(block, backward=False)
        return {"activations": int(max(hidden + running - sum(head.values()), hidden)), **head}

    def _update(
        self,
        model: PlannedModel,
        weights: TrainedWeights,
        passes: Passes,
        recompute: Recompute,
        has_vocab: bool = True,
    ) -> Held:
        """The worst of three moments: the head's backward, a layer's backward, the optimizer's step."""
        layer, block, stages = self._layer(model), passes.block, self.models.stages(model)
        chunks = stages.layers(self.pp_rank)
        alive = in_flight(self.models.grid.pp_size, self.pp_rank, self.models.vpp_size, passes.num_blocks)
        hidden, saved = layer.input_bytes(block), layer.saved_bytes(block)
        num_layers = max(len(chunk) for chunk in chunks)
        kept = alive * (recompute.kept_bytes(num_layers, hidden, saved) + 2 * hidden)
        gradient = self._largest_gradient(weights, lambda name: "layers" in name)
        running = recompute.made_bytes(num_layers, saved) + layer.transient_bytes(block, backward=True)
        head = self._head(block, CHUNKS_BACKWARD, has_vocab)
        moments = [{"activations": int(kept + running), "weight gradient": gradient}]
        if head:
            at_head = self._largest_gradient(weights, lambda name: "layers" not in name)
            moments.append({"activations": int(kept), "weight gradient": at_head, **head})
        # Adam's temporaries: as many as the foreach form makes of the whole shard on a GPU, else of one parameter.
        largest = self._largest_gradient(weights, lambda name: True) // layer.element * FP32
        share = weights.optimizer_share(self.pp_rank) * FP32
        temporaries = 2 * (share if self.config.trainer.device == "cuda" else min(share, largest))
        moments.append({"optimizer step": temporaries})
        return max(moments, key=lambda held: sum(held.values()))

    def _largest_gradient(self, weights: TrainedWeights, wanted: Callable[[str], bool]) -> int:
        """The largest gradient beside the buffers, in the model's dtype; of stacked experts with its parts."""
        sizes = [
            shard_numel * (2 if weights.specs[name].tensor.is_expert else 1)
            for name, shard_numel in weights.shard_numels(self.pp_rank).items()
            if wanted(name)
        ]
        return max(sizes, default=0) * self.models.element


def _resting_kinds(megatron: MegatronConfig) -> list[str]:
    kinds = ["gradients"] if megatron.grad_offload else []
    kinds += ["moments", "masters"] if megatron.optimizer_offload else []
    return kinds + (["parameters"] if megatron.param_offload else [])
