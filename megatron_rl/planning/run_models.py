"""The models of a run on the grids of its pools, and the resharding between training and generation, as planned from
the configuration and config.json alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from functools import cached_property, lru_cache

from megatron_rl.checkpoint.model_folder import ModelFolders, model_folders
from megatron_rl.config.megatron import COUNTED_PARTS, UNEVEN_STAGES
from megatron_rl.config.roles import ROLLOUT, Placement, PoolSpec, RoleSpec
from megatron_rl.config.rollout_keys import MTPUse
from megatron_rl.config.schema import RunConfig
from megatron_rl.hybrid_engine.eight_bit_members import CODE_BYTES, SCALE_BYTES, EightBitTensors, own_numel
from megatron_rl.hybrid_engine.plan import HOST_UNIT, IN_SLOTS, STAGED, Member, aligned
from megatron_rl.model.families import VOCAB_PADDING, Model, ParamSpec, eight_bit_names, tensors_of
from megatron_rl.parallel.rank_grid import RolloutGrid, rollout_grid, train_grid
from megatron_rl.parallel.sharding import LogicalTensor, shard_of
from megatron_rl.planning.eight_bit_transition import EightBitTransition
from megatron_rl.planning.exchange_counts import ExchangeCounts, packed_bytes
from megatron_rl.planning.image_costs import ImageCosts
from megatron_rl.planning.role_ledger import RoleLedger
from megatron_rl.planning.role_params import RoleParams
from megatron_rl.planning.teaching_costs import TeachingCosts
from megatron_rl.planning.weights import ELEMENT_BYTES, TrainedWeights

NUM_SCRATCH = 4
"""Messages in flight during a resharding, as in `hybrid_engine.exchange`."""


ParamsKey = tuple[object, ...]
"""All that decides the parameters of a role: its model's folder, head, multi-token prediction and adapters."""


class PoolModels:
    """The roles of one pool on its ranks: the grids of training and of generation, and what each role holds.

    A pool with nothing but the rollout counts as one pipeline stage of TP 1.
    """

    def __init__(
        self, spec: PoolSpec, models: Mapping[str, Model], config: RunConfig, params: dict[ParamsKey, RoleParams]
    ) -> None:
        """models: path of a folder -> model. params: those read so far, of all pools and of variants of the run."""
        self.spec = spec
        self.megatron = spec.layout
        self.element = ELEMENT_BYTES[self.megatron.dtype]
        self.grid = train_grid(spec.world_size, self.megatron)
        generates = spec.role(ROLLOUT)
        self.rollout = rollout_grid(self.grid, generates.settings) if generates else None
        self.vpp_size = self.megatron.virtual_pipeline_model_parallel_size or 1
        self._models, self._config = models, config
        self._params = params
        self._ledgers: dict[str, RoleLedger] = {}

    def model(self, role: RoleSpec) -> Model:
        """Return the model of a role."""
        model = self._models[role.model_path]
        return model if role.mtp == MTPUse.NONE else self._with_mtp(model)

    @staticmethod
    @lru_cache(maxsize=4)
    def _with_mtp(model: Model) -> Model:
        """Return the model with its multi-token prediction layer; the same one for all of a run's roles."""
        return replace(model, has_mtp=True)

    def ledger(self, role: RoleSpec) -> RoleLedger:
        """Return what a role of this pool holds and needs."""
        if role.name not in self._ledgers:
            teaching = TeachingCosts.of(self._config, role, self._models)
            arguments = (self._config, role, self.model(role), self.params(role), self.spec.world_size)
            self._ledgers[role.name] = RoleLedger(*arguments, teaching)
        return self._ledgers[role.name]

    def params(self, role: RoleSpec) -> RoleParams:
        """Return the parameters of a role's model, read once for all roles and variants that share them."""
        still = role.mtp == MTPUse.FROZEN and role.is_trained
        lora = (role.lora.rank, *role.lora.target_modules, None, *role.lora.exclude_modules) if role.lora.rank else ()
        key = (role.model_path, role.has_value_head, role.mtp, still, lora, role.trains_tower)
        if key not in self._params:
            self._params[key] = RoleParams.of(role, self.model(role))
        return self._params[key]

    def weights(self, role: RoleSpec) -> TrainedWeights:
        """Return the parameters of a role's model."""
        return self.ledger(role).base


def bucket_bytes(config: RunConfig) -> int:
    """Return the most bytes of scratch memory of a resharding."""
    return config.actor_rollout_ref.rollout.update_weights_bucket_megabytes << 20


class ReshardingPlans:
    """The resharding of a colocated rollout, planned when it is first asked for; configurations that have one layout
    share it.

    Training ranks form exchange groups. All groups exchange the same, so the first one is planned.
    """

    def __init__(self, models: RunModels) -> None:
        self._models = models
        self.scratch: dict[tuple[int, int, bool], int] = {}

    @cached_property
    def exchange(self) -> ExchangeCounts:
        """The exchange of the policy's weights, as the hybrid engine plans it."""
        return self._exchange(self._models.actor_weights)

    @cached_property
    def adapter_exchange(self) -> ExchangeCounts | None:
        """The exchange of the adapters; None without."""
        adapters = self._models.actor_adapters
        return None if adapters is None else self._exchange(adapters)

    @cached_property
    def fp8(self) -> EightBitTransition | None:
        """The exchange of FP8 weights in place of the policy's; None: weights are served as they are trained."""
        models = self._models
        rollout = models.config.actor_rollout_ref.rollout
        if rollout.quantization is None:
            return None
        members = models.members_with(0)
        return EightBitTransition(models.actor.specs, members, rollout.quantization_block_size, models.element)

    def _exchange(self, weights: TrainedWeights) -> ExchangeCounts:
        models = self._models
        is_base = weights.is_frozen or models.actor_adapters is None
        drop = models.config.actor_rollout_ref.rollout.drop_train_weights and is_base
        members = models.members_with(0, weights)
        return ExchangeCounts(tensors_of(weights.params.specs), members, drop_train_weights=drop)


class RunModels:
    """Every role of a run on the grids of its pool, the actor's pool first.

    grid, megatron, element, vpp_size: of the actor's pool. In a task without generation "the actor" is the trained
    role. The configuration must have passed preflight.
    """

    def __init__(
        self,
        config: RunConfig,
        folders: ModelFolders | None = None,
        variant_of: RunModels | None = None,
    ) -> None:
        """folders: by path; None: those of the roles. variant_of: another configuration with the same models; they are
        read, and the resharding of one layout is planned, once.
        """
        self.config = config
        self.placement = Placement.of(config)
        kept = folders if variant_of is None else variant_of.folders
        self.folders: ModelFolders = model_folders(config) if kept is None else kept
        models = {role.model_path: self.folders[role.model_path].model for role in self.placement.roles.values()}
        self._params: dict[ParamsKey, RoleParams] = {} if variant_of is None else variant_of._params
        pools = self.placement.pools.items()
        self.pools = {name: PoolModels(spec, models, config, self._params) for name, spec in pools}
        self.training = self.pools[self.placement.leader.pool]
        self.grid, self.megatron = self.training.grid, self.training.megatron
        self.element, self.vpp_size = self.training.element, self.training.vpp_size
        self.actor_role = self.placement.leader
        self.actor = self.training.model(self.actor_role)
        self._by_layout: dict[tuple[object, ...], ReshardingPlans] = {} if variant_of is None else variant_of._by_layout
        self.resharding = ReshardingPlans(self)
        if self.placement.is_colocated:
            self.resharding = self._by_layout.setdefault(self._layout, self.resharding)

    @property
    def _layout(self) -> tuple[object, ...]:
        """All that decides which rank holds what, in training and in generation."""
        layout, rollout = self.training.spec.layout, self.config.actor_rollout_ref.rollout
        names = [field.name for field in fields(layout) if field.name.endswith("parallel_size")]
        training = [getattr(layout, name) for name in (*names, *UNEVEN_STAGES, *COUNTED_PARTS)]
        sizes = (rollout.tensor_model_parallel_size, rollout.expert_parallel_size, rollout.attention_dp_size)
        generation = (*sizes, rollout.drop_train_weights)
        return (*training, *generation, self.training.spec.size)

    @property
    def generating(self) -> PoolModels:
        """The pool that generates. Raises KeyError where nothing does."""
        return self.pools[self.placement.roles[ROLLOUT].pool]

    @property
    def rollout(self) -> RolloutGrid:
        """The grid of generation. Raises KeyError where there is none."""
        rollout = self.generating.rollout
        assert rollout is not None  # its pool generates
        return rollout

    @property
    def actor_weights(self) -> TrainedWeights:
        """The parameters of the policy, without adapters."""
        return self.training.weights(self.actor_role)

    @property
    def laid_actor_weights(self) -> TrainedWeights:
        """Those parameters as training has them in its buffers: next to a tower that is trained, too."""
        ledger = self.training.ledger(self.actor_role)
        return ledger.base if ledger.adapters else ledger.weights

    @property
    def actor_adapters(self) -> TrainedWeights | None:
        """The adapters that generation reads; None: the policy's weights are trained, or adapters are merged."""
        ledger = self.training.ledger(self.actor_role)
        return ledger.weights if ledger.adapters and self.actor_role.lora.crosses_alone else None

    def images(self, prompt: float | None = None) -> ImageCosts | None:
        """Return the costs of the images of a step; None where it reads none. prompt: mean tokens; None: longest."""
        if not self.placement.generates:
            return None
        folder = self.folders[self.actor_role.model_path].path
        return ImageCosts.of(self.config, self.actor, self.element, prompt, folder)

    @property
    def num_slots(self) -> int:
        """Slots for adapters of versions that are served; 0: generation reads training's adapters, or none."""
        slots = self.config.actor_rollout_ref.rollout.max_loras
        return 0 if slots == 1 or self.actor_adapters is None or not self.placement.is_colocated else slots

    @property
    def keeps_base(self) -> bool:
        """Whether the base moves once, and is kept on the device or on its host."""
        return self.actor_role.lora.keeps_base

    # A rollout on the actor's memory

    def members_with(self, rank: int, weights: TrainedWeights | None = None) -> list[Member]:
        """Return the members of a rank's exchange group. weights: those that are exchanged; None: the actor's."""
        per_node = self.training.spec.size.num_ranks_per_node
        weights = self.laid_actor_weights if weights is None else weights
        return weights.members(self.grid.exchange_group(rank), self.rollout, per_node, VOCAB_PADDING)

    def members_of_stage(self, pp_rank: int) -> list[int]:
        """Return the numbers of a pipeline stage's ranks in the first exchange group."""
        size = len(self.resharding.exchange.members) // self.grid.pp_size
        return [*range(pp_rank * size, (pp_rank + 1) * size)]

    def served_bytes(self, pp_rank: int) -> dict[str, int]:
        """Return what generation reads on a rank of a pipeline stage next to training's weights: name -> bytes."""
        received = {"received shards": self.receive_buffer_bytes(pp_rank, with_adapters=not self.num_slots)}
        left_out = set() if self.resharding.fp8 is None else eight_bit_names(self.actor.specs)
        return received | own_codes_bytes(self, pp_rank) | merged_bytes(self, pp_rank, without=left_out)

    def receive_buffer_bytes(self, pp_rank: int, *, with_adapters: bool = True) -> int:
        """Return the bytes of the largest receive buffers on any rank of a pipeline stage, of base weights and, unless
        with_adapters is false, adapters.
        """
        adapters = self.resharding.adapter_exchange if with_adapters else None

        def buffers(member: int) -> int:
            of_adapters = 0 if adapters is None else adapters.receive_buffer_numels[member] * self.element
            return of_adapters + sum(self.base_buffers(member))

        return max(map(buffers, self.members_of_stage(pp_rank)))

    def base_buffers(self, member: int) -> list[int]:
        """Return the bytes of each receive buffer of base weights on a member of an exchange group."""
        planned = self.resharding
        if planned.fp8 is not None:
            return planned.fp8.receive_buffers(member)
        return [planned.exchange.receive_buffer_numels[member] * self.element]

    def scratch_bytes(self, pp_rank: int, *, first: bool = False) -> int:
        """Return the bytes of packed messages on a rank of a pipeline stage during a resharding. Contiguous pieces are
        sent from where they are. Base and adapters are exchanged one after the other.

        first: of the first resharding, which also moves a base that then stays.
        """
        bucket = bucket_bytes(self.config)
        with_base = first or not self.keeps_base
        planned, key = self.resharding, (pp_rank, bucket, with_base)
        if key not in planned.scratch:
            member = self.members_of_stage(pp_rank)[0]
            exchanges = [planned.exchange if with_base and planned.fp8 is None else None, planned.adapter_exchange]
            sizes = [
                packed_bytes(exchange, member, bucket, NUM_SCRATCH, self.element)
                for exchange in exchanges
                if exchange is not None
            ]
            if with_base and planned.fp8 is not None:
                sizes.append(planned.fp8.scratch_bytes(member, bucket, NUM_SCRATCH))
            planned.scratch[key] = max(sizes)
        return planned.scratch[key]

    # A rollout in another pool

    @cached_property
    def rollout_weights_bytes(self) -> int:
        """Bytes of the shard that each rank of a rollout in its own pool keeps, rows of padding included."""
        place, adapters = self.rollout.place(0, VOCAB_PADDING), self.actor_adapters
        specs = {**self.actor.specs, **(adapters.params.specs if adapters else {})}
        tensors, size = transferred(self, specs)
        return sum(shard_of(tensor, place).numel for tensor in tensors.values()) * size


def transferred(models: RunModels, specs: Mapping[str, ParamSpec]) -> tuple[Mapping[str, LogicalTensor], int]:
    """Return the tensors that parameters are sent to another pool as, and the bytes of one of their elements."""
    rollout, tensors = models.config.actor_rollout_ref.rollout, tensors_of(specs)
    if rollout.quantization is None:
        return tensors, models.element
    eight_bits = EightBitTensors.of(tensors, eight_bit_names(specs), rollout.quantization_block_size)
    return eight_bits.as_bytes(models.element), 1


def made_to_send(models: RunModels, pp_rank: int) -> dict[str, int]:
    """Return the copies that a training rank of a pipeline stage makes of its shards to send them to another pool:
    name -> bytes.
    """
    rollout, specs, grid = models.config.actor_rollout_ref.rollout, models.actor.specs, models.grid
    if rollout.quantization is None or models.actor_role.lora.crosses_alone:
        return merged_bytes(models, pp_rank)
    per_node, first = models.training.spec.size.num_ranks_per_node, pp_rank * grid.stage_size
    senders = models.laid_actor_weights.members([first], RolloutGrid(grid, 1), per_node, VOCAB_PADDING)
    names = eight_bit_names(specs)
    tensors = EightBitTensors.of(tensors_of(specs), names, rollout.quantization_block_size)
    (codes,), (scales,), _ = tensors.members(senders)
    own = CODE_BYTES * own_numel(codes) + SCALE_BYTES * own_numel(scales)
    return merged_bytes(models, pp_rank, without=names) | {"own codes": own}


def resident_bytes(models: RunModels, pp_rank: int) -> dict[str, int]:
    """Return the part of `served_bytes` that stays allocated between rollouts: name -> bytes."""
    if not models.actor_role.lora.base_stays:
        return {}
    received = {"received shards": models.receive_buffer_bytes(pp_rank, with_adapters=False)}
    return {name: size for name, size in (received | own_codes_bytes(models, pp_rank)).items() if size}


def slot_bytes(models: RunModels, pp_rank: int) -> dict[str, int]:
    """Return the bytes of adapters of served versions on a rank of a pipeline stage, and of the buffer from which they
    come: name -> bytes. They stay allocated.
    """
    adapters = models.actor_adapters
    if adapters is None or not models.num_slots:
        return {}
    place, tensors = models.rollout.place(0, VOCAB_PADDING), tensors_of(adapters.params.specs)
    shard = sum(shard_of(tensor, place).numel for tensor in tensors.values())
    return {
        IN_SLOTS: models.num_slots * shard * models.element,
        STAGED: adapters.numel(pp_rank) * models.element,
    }


def own_codes_bytes(models: RunModels, pp_rank: int) -> dict[str, int]:
    """Return the bytes of FP8 values and scales of its own shards that a rank of a pipeline stage holds, at most; {}
    without FP8.
    """
    fp8 = models.resharding.fp8
    return (
        {} if fp8 is None else {"own codes": max(fp8.own_bytes[number] for number in models.members_of_stage(pp_rank))}
    )


def host_copy_bytes(models: RunModels, pp_rank: int) -> int:
    """Return the bytes of received base weights that a rank of a pipeline stage keeps in host memory, at most. Each
    receive buffer has a copy of its own, rounded up.
    """
    if not models.actor_role.lora.base_on_host or not models.placement.is_colocated:
        return 0
    return max(
        sum(-(-size // HOST_UNIT) * HOST_UNIT for size in models.base_buffers(member))
        for member in models.members_of_stage(pp_rank)
    )


def merged_bytes(models: RunModels, pp_rank: int, without: Collection[str] = ()) -> dict[str, int]:
    """Return the bytes of its own shards that a rank of a pipeline stage holds with adapters merged in; {} if none are.

    without: tensors that are merged in FP8 instead, by their names in generation.
    """
    if not models.actor_role.lora.is_merged:
        return {}
    specs, adapted = models.actor.specs, models.training.params(models.actor_role).adapted
    numels = models.actor_weights.shard_numels(pp_rank)
    own = [n for name, n in numels.items() if name in adapted and specs[name].tensor.name not in without]
    return {"own merged": (sum(map(aligned, own[:-1])) + sum(own[-1:])) * models.element}
