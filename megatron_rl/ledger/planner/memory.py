"""Memory of each rank in every phase of a step, planned from the configuration and config.json alone.

The plan counts the project's own tensors to the element (parameter, gradient and optimizer buffers, foreign stages, the
KV cache), activations from the layers' arithmetic, and estimates of what vLLM and CUDA need in addition. It assumes
that every sequence has the longest length and that experts are used evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.config.roles import ACTOR, CRITIC, REFERENCE, REWARD_MODEL, SCORER, TUNED, PassSpec, RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.hybrid_engine.plan import covers_training
from megatron_rl.ledger.planner.activations import (
    CHUNKS_BACKWARD,
    CHUNKS_FORWARD,
    MeanLayer,
    Recompute,
    in_flight,
)
from megatron_rl.ledger.planner.run_models import RunModels
from megatron_rl.ledger.planner.weights import TrainedWeights
from megatron_rl.model.chunks import chunk_tokens
from megatron_rl.model.families import Model
from megatron_rl.model.parts import FP32, LayerBlock

GEN, RESHARD, INIT, SAVE = "gen", "reshard", "init", "save"
"""Phases outside of the roles' passes; `PassSpec.phase` names the others."""
SCORING = (REWARD_MODEL, ACTOR, TUNED, REFERENCE, CRITIC, SCORER)
UPDATING = (CRITIC, ACTOR, SCORER, TUNED)
"""Kinds of roles whose scores and updates a pool runs, in this order."""

Held = dict[str, int]
"""Name of what is held -> bytes."""


@dataclass(frozen=True)
class StageMemory:
    """Memory of a rank of one pipeline stage. kind: only, first, middle, last. phases: phase -> what it holds."""

    pool: str
    pp_rank: int
    kind: str
    phases: dict[str, Held]

    def total(self, phase: str) -> int:
        """Return the peak bytes of a phase."""
        return sum(self.phases[phase].values())

    @property
    def worst_phase(self) -> str:
        """The phase with the highest peak."""
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> int:
        """Peak bytes over all phases."""
        return self.total(self.worst_phase)


@dataclass(frozen=True)
class Passes:
    """A role's pass in micro-batches: the largest one, and how many a rank runs for one optimizer step."""

    block: LayerBlock
    num_blocks: int


def plan_pools(models: RunModels) -> dict[str, list[StageMemory]]:
    """Return pool -> one rank of each pipeline stage. Other ranks of a stage hold the same up to rounding."""
    return {name: plan_stages(models, name) for name in models.pools}


def plan_stages(models: RunModels, pool: str | None = None) -> list[StageMemory]:
    """Return one rank of each pipeline stage of a pool. pool: None: the actor's."""
    name = models.training.spec.name if pool is None else pool
    return [MemoryOfStage(models, name, pp_rank).planned() for pp_rank in range(models.pools[name].grid.pp_size)]


def planned_memory(config: RunConfig) -> dict[str, dict[str, Held]]:
    """Return pool -> phase -> what the worst rank holds. The configuration must have passed preflight."""
    return {
        pool: {
            phase: max((stage.phases[phase] for stage in stages), key=lambda held: sum(held.values()))
            for phase in stages[0].phases
        }
        for pool, stages in plan_pools(RunModels(config)).items()
    }


def phase_order(roles: Sequence[RoleSpec]) -> list[str]:
    """Return the phases that these roles can have, in the order of a step."""
    scores = [role.score.phase for kind in SCORING for role in roles if role.kind == kind and role.score]
    updates = [role.update.phase for kind in UPDATING for role in roles if role.kind == kind and role.update]
    return [INIT, RESHARD, GEN, *scores, *updates, SAVE]


class MemoryOfStage:
    """The memory arithmetic of one pipeline stage of a pool."""

    def __init__(self, models: RunModels, pool: str, pp_rank: int) -> None:
        self.models = models
        self.pool = models.pools[pool]
        self.roles = self.pool.spec.megatron_roles
        self.pp_rank = pp_rank
        self.config = models.config
        self.is_last = pp_rank == self.pool.grid.pp_size - 1
        self.is_first = pp_rank == 0
        self.generates = models.placement.generates and self.pool is models.generating
        self.is_split = models.placement.generates and not models.placement.is_colocated

    def planned(self) -> StageMemory:
        """Return the memory of all phases of this pool."""
        held: Held = {}
        for role in self.roles:
            held |= self._trained(role) if role.is_trained else self._frozen(role)
        if self.generates and self.is_split:
            held["rollout weights"] = self.models.rollout_weights_bytes
            if self.config.samples_ahead and self.config.async_training.second_buffer:
                held["arriving weights"] = self.models.rollout_weights_bytes
        phases = {
            INIT: {
                **{name: size for name, size in held.items() if not name.endswith("moments")},
                **(self._rollout_memory() if self.generates else {}),
            },
            **self._generation_phases(held),
        }
        for role in self.roles:
            if role.score is not None:
                phases[role.score.phase] = held | self._forward(role, self._passes(role, role.score))
            if role.update is not None:
                phases[role.update.phase] = held | self._update(role, self._passes(role, role.update))
        if any(role.is_trained for role in self.roles):
            phases[SAVE] = held | self._checkpoint_copy()
        kind = "only" if self.is_first and self.is_last else "first" if self.is_first else "middle"
        kind = "last" if self.is_last and not self.is_first else kind
        ordered = {name: phases[name] for name in phase_order(self.roles) if name in phases}
        return StageMemory(self.pool.spec.name, self.pp_rank, kind, ordered)

    # Permanent tensors

    def _frozen(self, role: RoleSpec) -> Held:
        """Return the parameters of a frozen role; they have no padding."""
        return {f"{role.name} parameters": self.pool.weights(role).num_params(self.pp_rank) * self.pool.element}

    def _trained(self, role: RoleSpec) -> Held:
        """Return parameters in the model's dtype, gradients in float32, and the rank's share of moments and of masters
        of bfloat16 weights, which data-parallel ranks shard (ZeRO stage 1, Rajbhandari et al., arXiv:1910.02054).
        """
        weights = self.pool.weights(role)
        numel, share = weights.numel(self.pp_rank), weights.optimizer_share(self.pp_rank)
        return trained_held(role, numel, share, self.pool.element, self.config.trainer.device)

    def _checkpoint_copy(self) -> Held:
        """Return the copies that a save keeps until they are written.

        From a GPU they go to host memory, which the plan does not count. On a CPU megatron-core copies slices of larger
        tensors: all weights, and moments of several segments. An asynchronous save copies the other moments as well.
        """
        if self.config.trainer.device != "cpu":
            return {}
        copied = 0
        for role in (role for role in self.roles if role.is_trained):
            weights, is_async = self.pool.weights(role), role.settings.checkpoint.async_save
            numels = weights.shard_numels(self.pp_rank)
            masters = FP32 if is_async and self.pool.element != FP32 else 0
            for buffer in weights.buffers[self.pp_rank]:
                copies = [name for name in buffer.names if is_async or len(weights.specs[name].tensor.segments) > 1]
                moments = sum(numels[name] for name in copies) * 2 * FP32
                copied += (buffer.num_params * (self.pool.element + masters) + moments) // buffer.num_shares
        return {"checkpoint copy": copied}

    # Generation

    def _generation_phases(self, held: Held) -> dict[str, Held]:
        """Return the transition, and generation where this pool generates. Offloaded tensors are away in both."""
        if self.is_split and self.generates:
            staying = self._staying(held)
            bucket = min(self.models.bucket_bytes, self.models.rollout_weights_bytes)
            return {
                RESHARD: staying | {"exchange scratch": bucket},
                GEN: staying | self._rollout_memory(),
            }
        if self.is_split and self.pool is self.models.training:
            bucket = min(self.models.bucket_bytes, held["actor parameters"])
            return {RESHARD: held | {"exchange scratch": bucket}}
        return self._in_place(held) if self.generates else {}

    def _in_place(self, held: Held) -> dict[str, Held]:
        """Return both phases of a rollout in the actor's memory.

        After the exchange the training copy may be dropped, and then the cache is allocated.
        """
        staying = self._staying(held)
        foreign = self.models.foreign_bytes(self.pp_rank)
        exchange = staying | {"foreign stages": foreign, "exchange scratch": self.models.scratch_bytes(self.pp_rank)}
        dropped = {"actor parameters": 0} if self._drops_training() else {}
        cache = self.config.actor_rollout_ref.rollout.kv_cache_memory_bytes
        woken = staying | dropped | {"foreign stages": foreign, "KV cache": cache}
        reshard = max(exchange, woken, key=lambda moment: sum(moment.values()))
        return {RESHARD: reshard, GEN: staying | dropped | self._rollout_memory()}

    def _staying(self, held: Held) -> Held:
        """Return what stays on the device while this pool generates."""
        offloaded = {f"{role.name} {kind}" for role in self.roles for kind in _offloaded_kinds(role.megatron)}
        return {name: size for name, size in held.items() if name not in offloaded}

    def _drops_training(self) -> bool:
        if not self.config.actor_rollout_ref.rollout.drop_train_weights:
            return False
        exchange, number = self.models.exchange, self.models.members_of_stage(self.pp_rank)[0]
        return covers_training(exchange.plans[number], exchange.held[number])

    def _rollout_memory(self) -> Held:
        """Return what vLLM holds."""
        rollout = self.config.actor_rollout_ref.rollout
        tp_size = rollout.tensor_model_parallel_size
        activations = engine_bytes(self.config, self.models.actor, self.models.element, tp_size)
        foreign = {} if self.is_split else {"foreign stages": self.models.foreign_bytes(self.pp_rank)}
        return {
            **foreign,
            "KV cache": rollout.kv_cache_memory_bytes,
            "vLLM activations": activations,
        }

    # Passes through the trainer

    def _passes(self, role: RoleSpec, pass_spec: PassSpec) -> Passes:
        """Return the micro-batches of a pass; with dynamic CP the largest over all sizes of a group."""
        grid = self.pool.grid
        multiple = grid.tp_size if self.pool.megatron.sequence_parallel else 1
        if not grid.pack_sizes:
            return passes_of(self.config, role, pass_spec, grid.dp_size, multiple, grid.cp_size)
        sized = [
            passes_of(self.config, role, pass_spec, grid.num_replicas // size, multiple, size)
            for size in grid.pack_sizes
        ]
        return largest_of(sized)

    def _exchanged_keys(self, role: RoleSpec, block: LayerBlock, *, backward: bool) -> float:
        """Return the bytes of other context-parallel ranks' keys and values."""
        grid, way = self.pool.grid, role.megatron.override_transformer_config.cp_comm_type
        layer = self.pool.layer(self.pool.model(role))
        return layer.exchanged_bytes(block, grid.most_sharing or grid.cp_size, way, backward=backward)

    def _head(self, role: RoleSpec, block: LayerBlock, num_chunks: int) -> Held:
        """Return the logits that exist at the same time, and the hidden states of the scored tokens."""
        if not self.is_last or role.has_value_head:
            return {}
        shape, multiple = self.pool.model(role).shape, self.pool.vocab_multiple
        rows = -(-shape.vocab_size // multiple) * multiple // self.pool.grid.tp_size
        return head_held(shape.hidden_size, rows, block, num_chunks, self.pool.element)

    def _forward(self, role: RoleSpec, passes: Passes) -> Held:
        layer, block = self.pool.layer(self.pool.model(role)), passes.block
        exchanged = self._exchanged_keys(role, block, backward=False)
        return forward_held(layer, block, self._head(role, block, CHUNKS_FORWARD), exchanged)

    def _update(self, role: RoleSpec, passes: Passes) -> Held:
        model, weights = self.pool.model(role), self.pool.weights(role)
        block, chunks = passes.block, self.pool.stages(model).layers(self.pp_rank)
        alive = in_flight(self.pool.grid.pp_size, self.pp_rank, self.pool.vpp_size, passes.num_blocks)
        gradients = LargestGradients(
            self._largest_gradient(weights, lambda name: "layers" in name),
            self._largest_gradient(weights, lambda name: "layers" not in name),
        )
        return update_held(
            self.pool.layer(model),
            block,
            Recompute.of(role.megatron),
            max(len(chunk) for chunk in chunks),
            alive,
            gradients,
            self._head(role, block, CHUNKS_BACKWARD),
            optimizer_temporaries(
                role, weights.optimizer_share(self.pp_rank), gradients, self.pool.element, self.config.trainer.device
            ),
            self._exchanged_keys(role, block, backward=True),
        )

    def _largest_gradient(self, weights: TrainedWeights, wanted: Callable[[str], bool]) -> int:
        """Return the bytes of the largest gradient outside of the buffers; stacked experts also have their parts."""
        sizes = [
            shard_numel * (2 if weights.specs[name].tensor.is_expert else 1)
            for name, shard_numel in weights.shard_numels(self.pp_rank).items()
            if wanted(name)
        ]
        return max(sizes, default=0) * self.pool.element


def most_scored(length: int, response: int, cp_size: int) -> int:
    """Return how many of a sequence's response tokens, its last ones, the rank with most of them scores."""
    chunk = length // (2 * cp_size)
    return min(chunk, response) + min(chunk, max(0, response - length // 2)) if cp_size > 1 else response


# The arithmetic of one role on one stage, from its numbers


@dataclass(frozen=True)
class LargestGradients:
    """Bytes of the largest gradient outside of the buffers, in the model's dtype: of layers, and of the rest."""

    layers: int
    others: int


def trained_held(role: RoleSpec, numel: int, share: int, element: int, device: str) -> Held:
    """Return what a trained role holds, without what Adam keeps on the host.

    numel: elements of the buffers. share: elements whose optimizer state this rank keeps.
    """
    moments, masters = share * 2 * FP32, 0 if element == FP32 else share * FP32
    offloaded = offloaded_share(role)
    if device == "cpu":
        # The host is the device: Adam's host copies of gradients, and of weights without masters, count as well.
        moments += int(offloaded * share * FP32)
        masters = masters or int(offloaded * share * FP32)
    else:
        moments, masters = (int(size * (1 - offloaded)) for size in (moments, masters))
    return {
        f"{role.name} parameters": numel * element,
        f"{role.name} gradients": numel * FP32,
        f"{role.name} moments": moments,
        **({f"{role.name} masters": masters} if masters else {}),
    }


def engine_bytes(config: RunConfig, model: Model, element: int, tp: int) -> int:
    """Return an estimate of what vLLM needs besides weights and cache: the tokens of a step through one layer, and the
    gathered float32 logits of all sequences, with a copy for filtering and one for log-probs.
    """
    rollout, shape = config.actor_rollout_ref.rollout, model.shape
    # A step takes at most whole prompts, or one token of each sequence.
    tokens = min(rollout.max_num_batched_tokens, rollout.max_num_seqs * config.data.max_prompt_length)
    parts = max(sum(part.engine_elements(tp) for part in layer.parts) for layer in model.kinds)
    layer = tokens * (4 * shape.hidden_size + parts) * element
    return layer + 3 * rollout.max_num_seqs * shape.vocab_size * FP32


def passes_of(
    config: RunConfig, role: RoleSpec, pass_spec: PassSpec, dp_size: int, multiple: int, cp_size: int = 1
) -> Passes:
    """Return the micro-batches of a pass over a rank's share of the samples of a step, or of a mini-batch.

    Every sequence has the longest length, or the token limit of a pass over cp_size ranks. Examples that an update
    mixes in count as well. multiple: to which the tokens of a rank's part are padded.
    """
    sizes = config.batch_sizes
    num_samples = sizes.mini_batch_samples(role.settings) if pass_spec is role.update else sizes.num_samples
    own = blocks_of(config, pass_spec, num_samples, dp_size, multiple, cp_size)
    if pass_spec is not role.update or role.mixed is None:
        return own
    longer = replace(pass_spec, longest=role.mixed.longest, scored=role.mixed.longest - 1)
    mixed = blocks_of(config, longer, role.mixed.num_examples, dp_size, multiple, cp_size)
    return replace(largest_of([own, mixed]), num_blocks=own.num_blocks + mixed.num_blocks)


def blocks_of(
    config: RunConfig, pass_spec: PassSpec, num_samples: int, dp_size: int, multiple: int, cp_size: int
) -> Passes:
    """Return the micro-batches of a pass over `num_samples` rows."""
    longest = config.longest_sequence if pass_spec.longest is None else pass_spec.longest
    length = longest + pass_spec.extra_tokens
    if pass_spec.max_tokens is not None:
        length = min(length, pass_spec.max_tokens * cp_size)
    share = max(1, -(-num_samples // dp_size))
    if cp_size > 1:
        length = -(-length // (2 * cp_size)) * 2 * cp_size
    rows = pass_spec.num_rows if pass_spec.max_tokens is None else max(1, pass_spec.max_tokens * cp_size // length)
    rows = min(rows, share)
    response = config.longest_response if pass_spec.scored is None else pass_spec.scored
    tokens = -(-rows * length // cp_size // multiple) * multiple
    # With CP the chunks of a rank are gathered as they are, without padding.
    is_packed = pass_spec.remove_padding and cp_size == 1
    scored = most_scored(length, min(length, response), cp_size)
    return Passes(LayerBlock(tokens, tokens, rows * scored, is_packed, length), -(-share // rows))


def largest_of(passes: Sequence[Passes]) -> Passes:
    """Return a bound in every number of passes that may be any of these."""
    blocks = [each.block for each in passes]
    largest = LayerBlock(
        max(block.tokens for block in blocks),
        max(block.slots for block in blocks),
        max(block.response_tokens for block in blocks),
        any(block.is_packed for block in blocks),
        max(block.longest for block in blocks),
    )
    return Passes(largest, max(each.num_blocks for each in passes))


def head_held(hidden: int, rows: int, block: LayerBlock, num_chunks: int, element: int) -> Held:
    """Return the logits of `num_chunks` chunks and the scored hidden states. rows: of the head on one rank."""
    scored = block.response_tokens * hidden * element
    logits = min(chunk_tokens(hidden, rows), block.response_tokens) * rows * FP32
    return {"logits chunk": num_chunks * logits + scored}


def forward_held(layer: MeanLayer, block: LayerBlock, head: Held, exchanged: float = 0.0) -> Held:
    """Return what a forward pass holds: hidden states, and one layer at a time or the head.

    exchanged: bytes of other ranks' keys and values while a layer attends to them.
    """
    hidden = 2 * block.tokens * layer.hidden * layer.element
    running = layer.transient_bytes(block, backward=False) + exchanged
    return {"activations": int(max(hidden + running - sum(head.values()), hidden)), **head}


def update_held(
    layer: MeanLayer,
    block: LayerBlock,
    recompute: Recompute,
    num_layers: int,
    alive: int,
    gradients: LargestGradients,
    head: Held,
    temporaries: int,
    exchanged: float = 0.0,
) -> Held:
    """Return what an update holds at the worst of three moments: the backward of a layer, of the head, or Adam's step.

    num_layers: of the largest chunk. alive: passes whose activations are kept. temporaries: bytes of Adam's.
    exchanged: as in `forward_held`.
    """
    parts = recompute.part_bytes(layer, block)
    hidden, saved = layer.input_bytes(block), layer.saved_bytes(block) - sum(parts)
    kept = alive * (recompute.kept_bytes(num_layers, hidden, saved) + 2 * hidden)
    made = recompute.made_bytes(num_layers, saved) + max(parts, default=0.0)
    running = made + layer.transient_bytes(block, backward=True) + exchanged
    moments = [{"activations": int(kept + running), "weight gradient": gradients.layers}]
    if head:
        at_head = gradients.others
        if layer.element < FP32:  # products in the model's dtype accumulate in float32
            at_head += at_head // layer.element * FP32
        moments.append({"activations": int(kept), "weight gradient": at_head, **head})
    moments.append({"optimizer step": temporaries})
    return max(moments, key=lambda held: sum(held.values()))


def optimizer_temporaries(role: RoleSpec, share: int, gradients: LargestGradients, element: int, device: str) -> int:
    """Return the bytes of Adam's temporaries.

    On a GPU torch's foreach form makes one copy of the shard, the second moments' roots, and changes it in place;
    weight decay is decoupled, so gradients are not copied. On a CPU the loop over parameters makes two, of one
    parameter: the root and its quotient. That the quotient of the parameter before is still there is not counted.
    """
    if device == "cuda":
        return int(share * FP32 * (1 - offloaded_share(role)))
    largest = max(gradients.layers, gradients.others) // element * FP32
    return 2 * min(share * FP32, largest)


def offloaded_share(role: RoleSpec) -> float:
    """Return the share of a trained role's parameters whose optimizer state is on the host."""
    override = role.settings.optim.override_optimizer_config
    return override.optimizer_offload_fraction if override.optimizer_cpu_offload else 0.0


def _offloaded_kinds(megatron: MegatronConfig) -> list[str]:
    kinds = ["gradients"] if megatron.grad_offload else []
    kinds += ["moments", "masters"] if megatron.optimizer_offload else []
    return kinds + (["parameters"] if megatron.param_offload else [])
