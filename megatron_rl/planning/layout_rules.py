"""Rules of the layout of every pool: TP, PP, CP and EP, one grid for its roles, and rollout TP and EP."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron_rl.config.keys import REF, ROLLOUT
from megatron_rl.config.megatron import LAYOUT_KEYS, MegatronConfig
from megatron_rl.config.problems import divisors, nearest_number
from megatron_rl.config.roles import ROLLOUT as ROLLOUT_ROLE
from megatron_rl.config.roles import PoolSpec, RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation, shown
from megatron_rl.parallel.rank_grid import RolloutGrid, train_grid
from megatron_rl.planning.engine_rules import CPU_TP_SIZES, engine_tp_sizes
from megatron_rl.planning.folder_checks import ModelSizes
from megatron_rl.planning.stage_rules import SHARES, pp_sizes, stage_problems

EP_KEY = f"{ROLLOUT}.expert_parallel_size"
DP_KEY = f"{ROLLOUT}.data_parallel_size"


@dataclass(frozen=True)
class Layouts:
    """The TP, PP and CP sizes that fit all models and the ranks; `megatron` shares layers out among stages."""

    world_size: int
    models: list[ModelSizes]
    megatron: MegatronConfig = field(default_factory=MegatronConfig)

    @property
    def tp_sizes(self) -> list[int]:
        """TP sizes that divide everything TP cuts."""
        return divisors(math.gcd(*(model.max_tp for model in self.models)) or self.world_size)

    @property
    def pp_sizes(self) -> list[int]:
        """PP sizes that divide the ranks and over which the layers spread."""
        return pp_sizes(self.models, self.megatron, self.world_size)

    def nearest(self, tp_size: int, pp_size: int, cp_size: int = 1) -> tuple[int, int, int]:
        """The valid (tp, pp, cp) that is the fewest doublings and halvings away, with CP as it is if that is enough."""
        given, cp_sizes = (tp_size, pp_size, cp_size), divisors(self.world_size) if cp_size > 1 else [1]
        pairs = [(t, p) for t in self.tp_sizes for p in self.pp_sizes if self.world_size % (t * p) == 0]
        valid = [(t, p, c) for t, p in pairs for c in cp_sizes if self.world_size % (t * p * c) == 0]

        def distance(sizes: tuple[int, int, int]) -> tuple[float, bool]:
            steps = sum(abs(math.log2(size / wanted)) for size, wanted in zip(sizes, given, strict=True))
            return steps, sizes[2] != cp_size

        return min(valid, key=distance)


def models_of(roles: Iterable[RoleSpec], models: Sequence[ModelSizes]) -> list[ModelSizes]:
    """The models of some roles, each once, without models that could not be read."""
    paths = {role.model_path for role in roles}
    return [model for model in models if model.path in paths]


def layout_problems(pools: Sequence[PoolSpec], models: list[ModelSizes]) -> Iterable[Violation]:
    """TP, PP, pipeline stages and experts of every pool, by the keys of its first role."""
    total = sum(pool.world_size for pool in pools)
    generates = any(pool.role(ROLLOUT_ROLE) is not None for pool in pools)
    search = f"or see what fits: megatron-rl map --config FILE --gpus {total}" if generates and total > 1 else ""
    for pool in pools:
        if pool.megatron_roles:
            leader, own = pool.megatron_roles[0], models_of(pool.megatron_roles, models)
            yield from _size_problems(pool, leader, own, search)
            yield from expert_problems(leader, pool.world_size, own)


def _size_problems(pool: PoolSpec, leader: RoleSpec, models: list[ModelSizes], search: str) -> Iterable[Violation]:
    """TP, CP and PP against the ranks and the models. Constraints report sizes below 1. search: a further hint."""
    megatron, group = leader.megatron, f"{leader.key}.megatron"
    tp_key, pp_key = f"{group}.tensor_model_parallel_size", f"{group}.pipeline_model_parallel_size"
    tp_size, pp_size = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    cp_key, cp_size = f"{group}.context_parallel_size", megatron.context_parallel_size
    shares = [share for share in (getattr(megatron, key) for key in SHARES) if share is not None]
    if min(tp_size, pp_size, cp_size, *shares) < 1:
        return
    layouts = Layouts(pool.world_size, models, megatron)
    given = {tp_key: tp_size, pp_key: pp_size} | ({cp_key: cp_size} if cp_size > 1 else {})
    tp, pp, cp = layouts.nearest(tp_size, pp_size, cp_size)
    nearest = {key: size for key, size in ((tp_key, tp), (pp_key, pp), (cp_key, cp)) if size != given.get(key, 1)}
    if layouts.world_size % (tp_size * pp_size * cp_size):
        rule = f"must divide the {layouts.world_size} ranks ({pool.size})"
        yield Violation(given, rule, nearest, search, subject=_sizes(leader, tp_size, pp_size, cp_size))
    for model in models:
        for name, size in model.tp_divides.items():
            if size % tp_size:
                rule = f"must divide {name}({size}) of {model.path}"
                yield Violation({tp_key: tp_size}, rule, nearest, subject=f"tp({tp_size})")
    across = tp_size * cp_size
    stages = layouts.world_size // across if layouts.world_size % across == 0 else layouts.world_size
    yield from stage_problems(models, megatron, stages, group)


def _sizes(leader: RoleSpec, tp_size: int, pp_size: int, cp_size: int) -> str:
    """The sizes in a message. Other roles than the actor are named by their keys, which may follow the actor's."""
    sizes = f"tp({tp_size}) * " + (f"cp({cp_size}) * " if cp_size > 1 else "") + f"pp({pp_size})"
    return sizes if leader.kind.is_main else f"{sizes} of {leader.key}.megatron"


def sharing_problems(config: RunConfig, pools: Iterable[PoolSpec]) -> Iterable[Violation]:
    """Rules between roles of one pool."""
    for pool in pools:
        yield from _grid_problems(config, pool)


def _grid_problems(config: RunConfig, pool: PoolSpec) -> Iterable[Violation]:
    """Roles of a pool share one grid of processes. The reference's keys count even if it is not built."""
    if not pool.megatron_roles:
        return
    leader, *others = pool.megatron_roles
    followers = [(role.key, role.megatron) for role in others]
    ref = config.actor_rollout_ref.ref
    if leader.kind.is_main and ref.pool == pool.name and REF not in dict(followers):
        followers.append((REF, ref.megatron))
    where = "all roles" if leader.kind.is_main else f"all roles of {pool.name}"
    for group, megatron in followers:
        for name in LAYOUT_KEYS:
            ours, theirs = getattr(megatron, name), getattr(leader.megatron, name)
            if ours != theirs and not (name == "context_parallel_size" and theirs < 1):  # a constraint reports it
                key = f"{group}.megatron.{name}"
                equal = f"{leader.key}.megatron.{name}={shown(theirs)}"
                rule = f"must equal {equal}, because {where} share one grid of processes"
                yield Violation({key: ours}, rule, {key: theirs})


def rollout_problems(config: RunConfig, pools: Iterable[PoolSpec], models: list[ModelSizes]) -> Iterable[Violation]:
    """Rollout TP against the ranks of its pool, the actor's model and, if it reads the actor's memory, training TP."""
    pool = next((pool for pool in pools if pool.role(ROLLOUT_ROLE) is not None), None)
    rollout, shared = config.actor_rollout_ref.rollout, config.actor_rollout_ref
    tp_size, train_tp = rollout.tensor_model_parallel_size, shared.actor.megatron.tensor_model_parallel_size
    if pool is None or min(tp_size, train_tp) < 1:
        return
    key, world_size, in_place = f"{ROLLOUT}.tensor_model_parallel_size", pool.world_size, pool.name == shared.actor.pool
    model = next((model for model in models if model.path == shared.model.path), None)
    dp_size = rollout.attention_dp_size
    every = divisors(world_size // dp_size) if world_size % dp_size == 0 else []
    fitting = [size for size in every if model is None or not rollout_misfits(model, size, rollout.ep_size_at(size))]
    drops = rollout.drop_train_weights and in_place
    etp_size = shared.actor.megatron.expert_tensor_parallel_size
    expert_tp = train_tp if etp_size is None or model is None or not model.num_experts else etp_size
    if rollout.expert_parallel_size > 1:
        yield from rollout_expert_problems(config, pool, model)
        expert_tp = 0
    if drops and expert_tp >= 1:
        fitting = [size for size in fitting if train_tp % size == 0 and expert_tp % size == 0]
    fitting = engine_tp_sizes(config.trainer.device, fitting)
    nearest = {key: nearest_number(tp_size, fitting or [1])}
    if rollout.expert_parallel_size > 1:
        nearest[EP_KEY] = nearest[key] * dp_size
    if not engine_tp_sizes(config.trainer.device, [tp_size]):
        known = ", ".join(map(str, CPU_TP_SIZES))
        yield Violation({key: tp_size}, f"must be one of {known} on trainer.device=cpu, as vLLM's all-reduce", nearest)
    # On the actor's ranks a rollout TP that is training's is refused by training's rules: one message is enough.
    where = "" if in_place else f" of {pool.name} ({pool.size})"
    if dp_size > 1 and world_size % rollout.replica_size:
        given, subject = {DP_KEY: dp_size, key: tp_size}, f"tp({tp_size}) * dp({dp_size}) of {ROLLOUT}"
        sizes = divisors(world_size // tp_size) if world_size % tp_size == 0 else [1]
        if model is not None and model.num_experts:
            sizes = [size for size in sizes if model.num_experts % (tp_size * size) == 0] or [1]
        fits = {DP_KEY: nearest_number(dp_size, sizes)}
        fits[EP_KEY] = tp_size * fits[DP_KEY]
        yield Violation(given, f"must divide the {world_size} ranks{where}", fits, subject=subject)
    elif world_size % tp_size and not (in_place and tp_size == train_tp):
        yield Violation({key: tp_size}, f"must divide the {world_size} ranks{where}", nearest)
    if model is not None:
        for name, rule in rollout_misfits(model, tp_size, rollout.ep_size_at(tp_size)).items():
            if tp_size != train_tp or name not in model.tp_divides:
                given = {EP_KEY: rollout.expert_parallel_size} if name == "num_experts" else {key: tp_size}
                yield Violation(given, f"must {rule} of {model.path}", nearest)
    if drops and train_tp % tp_size:
        rule = (
            f"must divide training tp({train_tp}), as drop_train_weights=true needs training shards inside of its own"
        )
        yield Violation({key: tp_size}, rule, nearest)
    elif drops and expert_tp >= 1 and expert_tp % tp_size:
        rule = (
            f"must divide training's etp({expert_tp}), as drop_train_weights=true needs the shards of experts inside "
            "of its own"
        )
        yield Violation({key: tp_size}, rule, nearest)


def rollout_misfits(model: ModelSizes, tp_size: int, ep_size: int) -> dict[str, str]:
    """Sizes of the model that a rollout TP and EP do not fit, by name. Key/value heads are repeated on surplus ranks.
    ep_size: 1, or the ranks of a replica.
    """
    heads = model.num_key_value_heads
    misfits = {
        name: f"divide {name}({size})"
        for name, size in model.rollout_divides(ep_size).items()
        if size % (ep_size if name == "num_experts" else tp_size) and name != "num_key_value_heads"
    }
    if heads % tp_size and tp_size % heads:
        misfits["num_key_value_heads"] = f"divide or be a multiple of num_key_value_heads({heads})"
    return misfits


def rollout_expert_problems(config: RunConfig, pool: PoolSpec, model: ModelSizes | None) -> Iterable[Violation]:
    """Rollout EP above 1 against rollout TP, the model and, where the training weights are dropped, their experts."""
    shared, megatron = config.actor_rollout_ref, config.actor_rollout_ref.actor.megatron
    tp_size, ep_size = shared.rollout.tensor_model_parallel_size, shared.rollout.expert_parallel_size
    dp_size, replica_size = shared.rollout.attention_dp_size, shared.rollout.replica_size
    given = {EP_KEY: ep_size}
    if model is not None and not model.num_experts:
        yield Violation(given, f"needs a model with experts, and {model.path} has none", {EP_KEY: 1})
    elif ep_size != replica_size:
        search = ""
        if pool.world_size % ep_size == 0 and (model is None or not rollout_misfits(model, 1, ep_size)):
            search = f"or {DP_KEY}={ep_size // math.gcd(ep_size, tp_size)}"
            search += f" with {ROLLOUT}.tensor_model_parallel_size={math.gcd(ep_size, tp_size)}"
            search += ", with which this EP is possible"
        over = f"{ROLLOUT}.tensor_model_parallel_size({tp_size})" + f" * {DP_KEY}({dp_size})" * (dp_size > 1)
        rule = f"must be 1 or {over}, as vLLM deals experts out over all ranks of a replica"
        yield Violation(given, rule, {EP_KEY: replica_size}, search)
    elif min(tp_size, dp_size) > 1 and model is not None and model.shared_experts:
        rule = f"must be 1 with rollout tp({tp_size}): next to both, vLLM has the shared experts of {model.path} whole"
        whole = f"or {ROLLOUT}.tensor_model_parallel_size=1, {DP_KEY}={ep_size}"
        yield Violation({DP_KEY: dp_size}, rule, {DP_KEY: 1, EP_KEY: tp_size}, whole)
    elif dp_size > 1 and (judges := [role.name for role in pool.roles if role.kind.judges]):
        rule = f"must be 1 on the ranks of {judges[0]}: vLLM has one set of groups in a process, and a judge has no DP"
        yield Violation({DP_KEY: dp_size}, rule, {DP_KEY: 1, EP_KEY: tp_size})
    elif shared.rollout.drop_train_weights and pool.name == shared.actor.pool:
        try:
            grid = RolloutGrid(train_grid(pool.world_size, megatron), tp_size, ep_size, dp_size)
        except ValueError:
            return  # other checks report it
        if not grid.contains_training:
            ep, etp = grid.train.ep_size, grid.train.expert_tp_size
            rule = (
                f"must be such that the experts of each rank's training shard (ep({ep}), etp({etp})) are among those "
                "it generates with, as drop_train_weights=true cuts them out of these"
            )
            yield Violation(given, rule, {f"{ROLLOUT}.drop_train_weights": False})


@dataclass(frozen=True)
class ExpertLayouts:
    """The EP and ETP sizes that fit all models with experts and the ranks of one stage."""

    stage_size: int
    models: list[ModelSizes]

    @property
    def ep_sizes(self) -> list[int]:
        """EP sizes that give each rank the same number of whole experts."""
        return self._dividing(model.num_experts for model in self.models)

    @property
    def etp_sizes(self) -> list[int]:
        """ETP sizes that shard every expert evenly."""
        return self._dividing(model.moe_intermediate_size for model in self.models)

    def nearest(self, ep_size: int, etp_size: int) -> tuple[int, int]:
        """Return the valid (ep, etp) with the smallest distance in doublings and halvings."""
        valid = [(e, t) for e in self.ep_sizes for t in self.etp_sizes if self.stage_size % (e * t) == 0]
        return min(valid, key=lambda pair: abs(math.log2(pair[0] / ep_size)) + abs(math.log2(pair[1] / etp_size)))

    def _dividing(self, numbers: Iterable[int]) -> list[int]:
        return divisors(math.gcd(self.stage_size, *numbers))


def expert_problems(leader: RoleSpec, world_size: int, models: list[ModelSizes]) -> Iterable[Violation]:
    """Check EP, ETP and sequence parallelism against the ranks of a pool and the models of its roles.

    leader: the role whose keys are the pool's layout. Other rules check sizes below 1, and TP, CP and PP against the
    ranks.
    """
    megatron, group = leader.megatron, f"{leader.key}.megatron"
    ep_key, etp_key = f"{group}.expert_model_parallel_size", f"{group}.expert_tensor_parallel_size"
    tp_size, pp_size = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    cp_size, ep_size = megatron.context_parallel_size, megatron.expert_model_parallel_size
    etp_size = megatron.expert_tensor_parallel_size
    if etp_size is None:
        etp_size = tp_size
    if min(tp_size, pp_size, cp_size, ep_size, etp_size, world_size) < 1 or world_size % (tp_size * cp_size * pp_size):
        return
    with_experts = [model for model in models if model.num_experts]
    layouts = ExpertLayouts(world_size // pp_size, with_experts)
    if ep_size > 1 and models and not with_experts:
        yield Violation({ep_key: ep_size}, f"needs a model with experts, and {models[0].path} has none", {ep_key: 1})
        ep_size = 1  # the other rules are for what it must become
    if layouts.stage_size % (etp_size * ep_size):
        ep, etp = layouts.nearest(ep_size, etp_size)
        rule = f"must divide the {layouts.stage_size} ranks of a stage ({world_size} ranks / pp({pp_size}))"
        nearest = {ep_key: ep} | ({} if etp == etp_size else {etp_key: etp})
        subject = f"etp({etp_size}) * ep({ep_size})" + ("" if leader.kind.is_main else f" of {group}")
        given = {ep_key: megatron.expert_model_parallel_size, etp_key: megatron.expert_tensor_parallel_size}
        yield Violation(given, rule, nearest, subject=subject)
    for model in with_experts:
        if model.num_experts % ep_size:
            rule = f"must divide num_experts({model.num_experts}) of {model.path}"
            yield Violation({ep_key: ep_size}, rule, {ep_key: nearest_number(ep_size, layouts.ep_sizes)})
        if model.moe_intermediate_size % etp_size:
            rule = f"must divide {model.expert_size_key}({model.moe_intermediate_size}) of {model.path}"
            nearest = {etp_key: nearest_number(etp_size, layouts.etp_sizes)}
            given = {etp_key: megatron.expert_tensor_parallel_size}
            yield Violation(given, rule, nearest, subject=f"etp({etp_size})")
    if with_experts and tp_size > 1 and not megatron.sequence_parallel:
        key = f"{group}.sequence_parallel"
        yield Violation({key: False}, f"must be true: training experts with tp({tp_size}) > 1 needs it", {key: True})
