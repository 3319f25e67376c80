"""Memory of each rank in every phase of a step, planned from the configuration and config.json alone.

The plan counts the project's own tensors to the element (parameter, gradient and optimizer buffers, received shards,
the KV cache), activations from the layers' arithmetic, and estimates of what vLLM and CUDA need in addition. It assumes
that every sequence has the longest length and that experts are used evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.checkpoint.model_folder import ModelFolders
from megatron_rl.config.judge_engine import judge_tp_size
from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.config.roles import RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.hybrid_engine.delta_sizes import SENT_LAST
from megatron_rl.hybrid_engine.plan import ON_HOST
from megatron_rl.model.families import VOCAB_PADDING, Model, tensors_of
from megatron_rl.model.parts import FP32
from megatron_rl.parallel.rank_grid import RolloutGrid
from megatron_rl.parallel.sharding import shard_of
from megatron_rl.planning.delta_memory import indices, sent_last
from megatron_rl.planning.eight_bit_transition import product_numel
from megatron_rl.planning.exchange_counts import ExchangeCounts
from megatron_rl.planning.follower_transfers import follower_transfers
from megatron_rl.planning.role_ledger import IN_EIGHT_BITS, SCORE, TOWER, UPDATE, Held
from megatron_rl.planning.run_models import (
    PoolModels,
    RunModels,
    bucket_bytes,
    host_copy_bytes,
    made_to_send,
    resident_bytes,
    slot_bytes,
)

GEN, RESHARD, INIT, SAVE, IMAGES, JUDGING = "gen", "reshard", "init", "save", "images", "judge"
"""Phases outside of the roles' passes; `PassSpec.phase` names the others."""


@dataclass(frozen=True)
class StageMemory:
    """Memory of a rank of one pipeline stage. kind: only, first, middle, last. phases: phase -> what it holds.

    built: the largest moment of the start before there is an engine. exchanged: a rank at the end of the first exchange
    in place; {}: there is none.
    """

    pool: str
    pp_rank: int
    kind: str
    phases: dict[str, Held]
    built: Held
    exchanged: Held

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


def plan_pools(models: RunModels) -> dict[str, list[StageMemory]]:
    """Return pool -> one rank of each pipeline stage. Other ranks of a stage hold the same up to rounding."""
    return {name: plan_stages(models, name) for name in models.pools}


def plan_stages(models: RunModels, pool: str | None = None) -> list[StageMemory]:
    """Return one rank of each pipeline stage of a pool. pool: None: the actor's."""
    name = models.training.spec.name if pool is None else pool
    return [MemoryOfStage(models, name, pp_rank).planned() for pp_rank in range(models.pools[name].grid.pp_size)]


def planned_memory(config: RunConfig, folders: ModelFolders | None = None) -> dict[str, dict[str, Held]]:
    """Return pool -> phase -> what the worst rank holds. The configuration must have passed preflight."""
    return {
        pool: {
            phase: max((stage.phases[phase] for stage in stages), key=lambda held: sum(held.values()))
            for phase in stages[0].phases
        }
        for pool, stages in plan_pools(RunModels(config, folders)).items()
    }


def phase_order(roles: Sequence[RoleSpec]) -> list[str]:
    """Return the phases that these roles can have, in the order of a step."""
    scores = sorted((role.kind.scored, place, role.score.phase) for place, role in enumerate(roles) if role.score)
    updates = sorted((role.kind.updated, place, role.update.phase) for place, role in enumerate(roles) if role.update)
    return [INIT, IMAGES, RESHARD, GEN, JUDGING, *(phase for *_, phase in (*scores, *updates)), SAVE]


def without_moments(held: Held) -> Held:
    """Return what is held before the first pass, without what passes make: Adam's moments, FP8 weights."""
    return {name: size for name, size in held.items() if not name.endswith(("moments", IN_EIGHT_BITS))}


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
            held |= self._held(role)
        if self.generates and self.is_split:
            held["rollout weights"] = self.models.rollout_weights_bytes
            if self.config.samples_ahead and self.config.async_training.second_buffer:
                held["arriving weights"] = arriving_bytes(self.models)
        elif self.generates and (stays := resident_bytes(self.models, self.pp_rank)):
            held |= stays
        elif self.generates and self.config.trainer.device == "cpu" and self.models.actor_role.lora.base_on_host:
            held[ON_HOST] = host_copy_bytes(self.models, self.pp_rank)  # the host is the device
        elif self.is_split and self.pool is self.models.training:
            held |= sent_last(self.models, self.pp_rank)
        held |= slot_bytes(self.models, self.pp_rank) if self.generates else {}
        built = self._largest_while_built()
        # While the engine is built, training's memory has left as far as it does for generation.
        complete = without_moments(self._staying(held)) | self._rollout_memory() if self.generates else built
        moments = [built, complete]
        if self.models.keeps_base and self.generates:
            moments.append(without_moments(self._exchanged(held, first=True)))
        phases = {
            INIT: max(moments, key=lambda moment: sum(moment.values())),
            **self._generation_phases(held),
        }
        if judging := self._judging(held):
            phases[JUDGING] = judging
        if following := self._following(held):
            phases[RESHARD] = max(phases.get(RESHARD, {}), following, key=lambda moment: sum(moment.values()))
        if self.pool is self.models.training and (images := self.models.images()):
            leader, placement = self.models.actor_role, self.models.placement
            is_trained = leader.trains_tower
            reads = self.is_first and is_trained or self.is_last and placement.num_towers > is_trained
            phases[IMAGES] = held | ({"image pass": images.activation_bytes} if reads else {})
        for role in self.roles:
            ledger = self.pool.ledger(role)
            if role.score is not None:
                phases[role.score.phase] = held | ledger.forward(self.pp_rank, ledger.passes(SCORE))
            if role.update is not None:
                phases[role.update.phase] = held | ledger.update(self.pp_rank, ledger.passes(UPDATE))
        if any(role.is_trained or (role.follows and role.follows.is_kept) for role in self.roles):
            copied = sum(self.pool.ledger(role).checkpoint_copy(self.pp_rank) for role in self.roles)
            on_cpu = self.config.trainer.device == "cpu"
            extra = {"checkpoint copy": copied} if on_cpu else self._kept_by_passes()
            phases[SAVE] = held | extra
        kind = "only" if self.is_first and self.is_last else "first" if self.is_first else "middle"
        kind = "last" if self.is_last and not self.is_first else kind
        ordered = {name: phases[name] for name in phase_order(self.roles) if name in phases}
        return StageMemory(self.pool.spec.name, self.pp_rank, kind, ordered, built, self._exchanged(held, first=True))

    def _held(self, role: RoleSpec) -> Held:
        """Return what a role holds all the time."""
        ledger = self.pool.ledger(role)
        return ledger.held(self.pp_rank).named(role) | ledger.teacher_heads(self.pp_rank)

    def _kept_by_passes(self) -> Held:
        """Return what a pass leaves on a GPU for the next one."""
        gathered = max(self.pool.ledger(role).gathered_bytes() for role in self.roles)
        return {"gathered sequence": gathered} if gathered else {}

    def _largest_while_built(self) -> Held:
        """Return the largest moment while roles are built one after the other, before the rollout."""
        before: Held = {}
        moments = []
        for role in self.roles:
            ledger = self.pool.ledger(role)
            moments += [before | moment for moment in ledger.while_built(self.pp_rank)]
            before |= without_moments(self._held(role))
        return max([*moments, before], key=lambda moment: sum(moment.values()))

    def _judging(self, held: Held) -> Held:
        """Return the largest moment of a judge's call, with what stays in generation; {}: the pool has no judge."""
        moments = []
        for role in (role for role in self.roles if role.kind.judges):
            staying = self._staying(held) | {name: size for name, size in held.items() if name.startswith(role.name)}
            moments.append(staying | judge_bytes(self.models, self.pool, role, self.pp_rank))
        return max(moments, key=lambda moment: sum(moment.values()), default={})

    # Generation

    def _generation_phases(self, held: Held) -> dict[str, Held]:
        """Return the resharding, and generation where this pool generates. Offloaded tensors are away in both."""
        if self.is_split and self.generates:
            staying = self._staying(held)
            size = self.models.rollout_weights_bytes
            bucket = min(bucket_bytes(self.config), size)
            return {
                RESHARD: staying | {"exchange scratch": bucket} | indices(self.models, size, bucket),
                GEN: staying | self._rollout_memory(),
            }
        if self.is_split and self.pool is self.models.training:
            bucket = min(bucket_bytes(self.config), held["actor parameters"])
            made = made_to_send(self.models, self.pp_rank)
            finding = indices(self.models, held.get(SENT_LAST, 0), bucket)
            return {RESHARD: held | made | {"exchange scratch": bucket} | finding | self._kept_by_passes()}
        return self._in_place(held) if self.generates else {}

    def _following(self, held: Held) -> Held:
        """Return the largest moment of transfers to roles of other pools, on either side; {}: this pool has none."""
        transfers, bucket = follower_transfers(self.models), bucket_bytes(self.config)
        arriving = [each.arriving_bytes(self.pp_rank) for each in transfers if each.role in self.roles]
        if arriving:
            return held | {"arriving weights": max(arriving), "exchange scratch": min(bucket, max(arriving))}
        if not transfers or self.pool is not self.models.training:
            return {}
        return held | {"exchange scratch": min(bucket, held["actor parameters"])} | self._kept_by_passes()

    def _in_place(self, held: Held) -> dict[str, Held]:
        """Return both phases of a rollout in the actor's memory.

        After the exchange the training copy may be dropped, and then the cache is allocated.
        """
        staying = self._staying(held)
        exchange = self._exchanged(held)
        dropped = self._dropped()
        cache = self.config.actor_rollout_ref.rollout.kv_cache_memory_bytes
        woken = staying | dropped | self.models.served_bytes(self.pp_rank) | {"KV cache": cache}
        reshard = max(exchange, woken, key=lambda moment: sum(moment.values()))
        return {RESHARD: reshard, GEN: staying | dropped | self._rollout_memory()}

    def _exchanged(self, held: Held, *, first: bool = False) -> Held:
        """Return what is there at the end of an exchange in place. first: of the one that brings a base which stays."""
        if self.is_split or not self.generates:
            return {}
        scratch = {"exchange scratch": self.models.scratch_bytes(self.pp_rank, first=first)}
        return self._staying(held) | self.models.served_bytes(self.pp_rank) | scratch

    def _staying(self, held: Held) -> Held:
        """Return what stays on the device while this pool generates."""
        offloaded = {f"{role.name} {kind}" for role in self.roles for kind in _offloaded_kinds(role.megatron)}
        for role in self.roles:
            offloaded |= self.pool.ledger(role).teacher_heads(self.pp_rank, resting=True).keys()
        if self.config.has_turns:  # whose images the tower reads meanwhile
            offloaded -= {f"{role.name} {TOWER}" for role in self.roles}
        return {name: size for name, size in held.items() if name not in offloaded}

    def _dropped(self) -> Held:
        """Return what is left of training's parameters while their base is dropped, as a change: {} if it is not."""
        if not self._drops_training():
            return {}
        ledger = self.pool.ledger(self.models.actor_role)
        trained = ledger.weights.numel(self.pp_rank) * ledger.element if ledger.adapters else 0
        return {"actor parameters": trained}

    def _drops_training(self) -> bool:
        if not self.config.actor_rollout_ref.rollout.drop_train_weights:
            return False
        exchange, number = self.models.resharding.exchange, self.models.members_of_stage(self.pp_rank)[0]
        return exchange.covers_training(number)

    def _rollout_memory(self) -> Held:
        """Return what vLLM holds."""
        rollout = self.config.actor_rollout_ref.rollout
        tp_size = rollout.tensor_model_parallel_size
        dp_size = rollout.attention_dp_size
        activations = engine_bytes(self.config, self.models.actor, self.models.element, tp_size, dp_size)
        return {
            **({} if self.is_split else self.models.served_bytes(self.pp_rank)),
            "KV cache": rollout.kv_cache_memory_bytes,
            "vLLM activations": activations,
        }


def judge_bytes(models: RunModels, pool: PoolModels, role: RoleSpec, pp_rank: int) -> Held:
    """Return the memory of a judge next to its weights while it writes: weights of other stages, cache, activations."""
    config, weights, grid = models.config, pool.weights(role), pool.grid
    tp_size = judge_tp_size(config, role)
    per_node = pool.spec.size.num_ranks_per_node
    members = weights.members(grid.exchange_group(0), RolloutGrid(grid, tp_size), per_node, VOCAB_PADDING)
    exchange = ExchangeCounts(tensors_of(weights.params.specs), members, drop_train_weights=False)
    size = len(members) // grid.pp_size
    own = range(pp_rank * size, (pp_rank + 1) * size)
    gathered = max(exchange.receive_buffer_numels[number] for number in own) * pool.element
    return {
        f"{role.name} gathered": gathered,
        f"{role.name} KV cache": role.settings.judge.kv_cache_memory_bytes,
        "vLLM activations": engine_bytes(config, pool.model(role), pool.element, tp_size),
    }


def engine_bytes(config: RunConfig, model: Model, element: int, tp: int, dp_size: int = 1) -> int:
    """Return an estimate of what vLLM needs in addition to weights and cache: the tokens of a step through one layer,
    the largest weight that a product makes of codes, and the gathered float32 logits of all sequences, with a copy for
    filtering and one for log-probs. dp_size: attention DP.
    """
    rollout, shape = config.actor_rollout_ref.rollout, model.shape
    # A step takes at most whole prompts, or one token of each sequence.
    tokens = min(rollout.max_num_batched_tokens, rollout.max_num_seqs * config.data.max_prompt_length)
    parts = max(sum(part.engine_elements(tp) for part in layer.parts) for layer in model.kinds)
    # With attention DP a layer gathers the tokens of all TP groups for its experts, and sums for all of them.
    gathered = 2 * tokens * dp_size * shape.hidden_size if dp_size > 1 else 0
    layer = (tokens * (4 * shape.hidden_size + parts) + gathered + product_numel(config, model, tp)) * element
    return layer + 3 * rollout.max_num_seqs * shape.vocab_size * FP32


def arriving_bytes(models: RunModels) -> int:
    """Return the bytes of a second buffer of a rollout in its own pool: of adapters, where these come alone."""
    if models.actor_adapters is None:
        return models.rollout_weights_bytes
    place, tensors = models.rollout.place(0, VOCAB_PADDING), tensors_of(models.actor_adapters.params.specs)
    return sum(shard_of(tensor, place).numel for tensor in tensors.values()) * models.element


def _offloaded_kinds(megatron: MegatronConfig) -> list[str]:
    kinds = ["gradients"] if megatron.grad_offload else []
    kinds += ["moments", "masters"] if megatron.optimizer_offload else []
    return kinds + (["parameters", TOWER] if megatron.param_offload else [])
