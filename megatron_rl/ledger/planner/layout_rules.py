"""Rules of the layout of every pool: TP, PP and CP, one grid for its roles, and rollout TP."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron_rl.config.keys import ACTOR, REF, ROLLOUT
from megatron_rl.config.megatron import LAYOUT_KEYS, MegatronConfig
from megatron_rl.config.problems import divisors, nearest_number
from megatron_rl.config.roles import ACTOR as ACTOR_ROLE
from megatron_rl.config.roles import ROLLOUT as ROLLOUT_ROLE
from megatron_rl.config.roles import PoolSpec, RoleSpec, rollout_pool
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation, shown
from megatron_rl.ledger.planner.engine_rules import CPU_TP_SIZES, engine_tp_sizes
from megatron_rl.ledger.planner.expert_layout import expert_problems
from megatron_rl.ledger.planner.model_folder import ModelSizes
from megatron_rl.ledger.planner.stage_rules import SHARES, pp_sizes, stage_problems


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


def layout_problems(pools: Iterable[PoolSpec], models: list[ModelSizes]) -> Iterable[Violation]:
    """TP, PP, pipeline stages and experts of every pool, by the keys of its first role."""
    for pool in pools:
        if pool.megatron_roles:
            leader, own = pool.megatron_roles[0], models_of(pool.megatron_roles, models)
            yield from _size_problems(pool, leader, own)
            yield from expert_problems(leader, pool.world_size, own)


def _size_problems(pool: PoolSpec, leader: RoleSpec, models: list[ModelSizes]) -> Iterable[Violation]:
    """TP, CP and PP against the ranks and the models. Constraints report sizes below 1."""
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
        yield Violation(given, rule, nearest, subject=_sizes(leader, tp_size, pp_size, cp_size))
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
    return sizes if leader.kind == ACTOR_ROLE else f"{sizes} of {leader.key}.megatron"


def sharing_problems(config: RunConfig, pools: Iterable[PoolSpec]) -> Iterable[Violation]:
    """Rules between roles of one pool."""
    actor = config.actor_rollout_ref.actor
    if config.generates and actor.megatron.param_offload and actor.pool == rollout_pool(config):
        key = f"{ACTOR}.megatron.param_offload"
        hint = f"{ROLLOUT}.drop_train_weights=true saves memory where rollout TP is below training TP"
        yield Violation({key: True}, "must be false: generation reads the actor's parameters", {key: False}, hint)
    for pool in pools:
        yield from _grid_problems(config, pool)


def _grid_problems(config: RunConfig, pool: PoolSpec) -> Iterable[Violation]:
    """Roles of a pool share one grid of processes. The reference's keys count even if it is not built."""
    if not pool.megatron_roles:
        return
    leader, *others = pool.megatron_roles
    followers = [(role.key, role.megatron) for role in others]
    ref = config.actor_rollout_ref.ref
    if leader.kind == ACTOR_ROLE and ref.pool == pool.name and REF not in dict(followers):
        followers.append((REF, ref.megatron))
    where = "all roles" if leader.kind == ACTOR_ROLE else f"all roles of {pool.name}"
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
    fitting = [size for size in divisors(world_size) if model is None or not rollout_misfits(model, size)]
    drops = rollout.drop_train_weights and in_place
    etp_size = shared.actor.megatron.expert_tensor_parallel_size
    expert_tp = train_tp if etp_size is None or model is None or not model.num_experts else etp_size
    if drops and expert_tp >= 1:
        fitting = [size for size in fitting if train_tp % size == 0 and expert_tp % size == 0]
    fitting = engine_tp_sizes(config.trainer.device, fitting)
    nearest = {key: nearest_number(tp_size, fitting or [1])}
    if not engine_tp_sizes(config.trainer.device, [tp_size]):
        sizes = ", ".join(map(str, CPU_TP_SIZES))
        yield Violation({key: tp_size}, f"must be one of {sizes} on trainer.device=cpu, as vLLM's all-reduce", nearest)
    # On the actor's ranks a rollout TP that is training's is refused by training's rules: one message is enough.
    if world_size % tp_size and not (in_place and tp_size == train_tp):
        where = "" if in_place else f" of {pool.name} ({pool.size})"
        yield Violation({key: tp_size}, f"must divide the {world_size} ranks{where}", nearest)
    if model is not None:
        for name, rule in rollout_misfits(model, tp_size).items():
            if tp_size != train_tp or name not in model.tp_divides:
                yield Violation({key: tp_size}, f"must {rule} of {model.path}", nearest)
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


def rollout_misfits(model: ModelSizes, tp_size: int) -> dict[str, str]:
    """Sizes of the model that a rollout TP does not fit, by name. Key/value heads are repeated on surplus ranks."""
    heads = model.num_key_value_heads
    misfits = {
        name: f"divide {name}({size})"
        for name, size in model.rollout_tp_divides.items()
        if size % tp_size and name != "num_key_value_heads"
    }
    if heads % tp_size and tp_size % heads:
        misfits["num_key_value_heads"] = f"divide or be a multiple of num_key_value_heads({heads})"
    return misfits
