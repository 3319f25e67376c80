"""The roles of a run, the passes of each, and the pool of ranks that hosts it: one table of plain data.

Preflight, memory plan, time estimate and the ranks read this table; none of them lists roles by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.columns import ACTOR_SCORES, ACTOR_UPDATE, CRITIC_UPDATE, LOG_PROBS_AT, SCORING
from megatron_rl.config.algorithms import (
    STUDENTS_TOP,
    distillation_reads,
    scores_old_log_probs,
    teaching,
    uses_critic,
    uses_reference,
)
from megatron_rl.config.distillation_keys import SELF, TeacherConfig
from megatron_rl.config.lora import LoraConfig
from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.config.reward_keys import ScoringModelConfig
from megatron_rl.config.role_kinds import ACTOR as ACTOR
from megatron_rl.config.role_kinds import CRITIC as CRITIC
from megatron_rl.config.role_kinds import JUDGE as JUDGE
from megatron_rl.config.role_kinds import KINDS
from megatron_rl.config.role_kinds import REFERENCE as REFERENCE
from megatron_rl.config.role_kinds import REWARD_MODEL as REWARD_MODEL
from megatron_rl.config.role_kinds import ROLLOUT as ROLLOUT
from megatron_rl.config.role_kinds import SCORER as SCORER
from megatron_rl.config.role_kinds import TEACHER as TEACHER
from megatron_rl.config.role_kinds import TUNED as TUNED
from megatron_rl.config.role_specs import Following as Following
from megatron_rl.config.role_specs import Mixed as Mixed
from megatron_rl.config.role_specs import PassCall as PassCall
from megatron_rl.config.role_specs import PassSpec as PassSpec
from megatron_rl.config.role_specs import RoleSpec as RoleSpec
from megatron_rl.config.rollout_keys import MTPUse
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.task_config import TaskConfig
from megatron_rl.config.tasks import DPO, REWARD, SFT
from megatron_rl.config.trainer import GLOBAL_POOL

ROLLOUT_POOL, REWARD_POOL = "rollout_pool", "reward_pool"
"""Pools that verl's own keys make: hybrid_engine=false, and reward_model.enable_resource_pool=true."""


@dataclass(frozen=True)
class PoolSize:
    """Machines and ranks per machine of a pool, and the keys that set them."""

    num_nodes: int
    num_ranks_per_node: int
    nodes_key: str = "trainer.nnodes"
    ranks_key: str = "trainer.n_gpus_per_node"

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.num_ranks_per_node

    def __str__(self) -> str:
        return f"{self.nodes_key}={self.num_nodes} * {self.ranks_key}={self.num_ranks_per_node}"


@dataclass(frozen=True)
class PoolSpec:
    """A named set of ranks with a world of their own, and the roles that its processes host."""

    name: str
    size: PoolSize
    roles: tuple[RoleSpec, ...]

    @property
    def world_size(self) -> int:
        return self.size.world_size

    @property
    def megatron_roles(self) -> tuple[RoleSpec, ...]:
        """Roles on Megatron's grid, which share one layout."""
        return tuple(role for role in self.roles if not role.kind.generates)

    @property
    def layout(self) -> MegatronConfig:
        """The layout of the grid; TP 1 and PP 1 in a pool that only generates."""
        return self.megatron_roles[0].megatron if self.megatron_roles else MegatronConfig()

    def role(self, name: str) -> RoleSpec | None:
        """The role of this name, or None."""
        return next((role for role in self.roles if role.name == name), None)


@dataclass(frozen=True)
class Placement:
    """Every role by name, in the order of building, and every pool by name, the actor's first."""

    roles: dict[str, RoleSpec]
    pools: dict[str, PoolSpec]

    @classmethod
    def of(cls, config: RunConfig) -> Placement:
        """Place the roles of a configuration that has passed preflight. Raises KeyError for an undefined pool, and
        ValueError where two passes are one phase, of which plans would show one alone.
        """
        roles = {role.name: role for role in roles_of(config)}
        phases = [phase for role in roles.values() for phase in role.phases.values()]
        if twice := sorted({phase for phase in phases if phases.count(phase) > 1}):
            raise ValueError(f"{', '.join(twice)}: the phase of two passes; each needs a name of its own")
        sizes = pool_sizes(config)
        names = dict.fromkeys(role.pool for role in roles.values())
        hosted = {name: tuple(role for role in roles.values() if role.pool == name) for name in names}
        return cls(roles, {name: PoolSpec(name, sizes[name], inside) for name, inside in hosted.items()})

    @property
    def is_colocated(self) -> bool:
        """Whether generation reads the actor's own memory."""
        return self.generates and self.roles[ROLLOUT].pool == self.roles[ACTOR].pool

    @property
    def generates(self) -> bool:
        """Whether there is a rollout."""
        return ROLLOUT in self.roles

    @property
    def leader(self) -> RoleSpec:
        """The role that takes part in every step: the actor, or the role that a task trains."""
        return next(iter(self.roles.values()))

    @property
    def megatron_roles(self) -> list[RoleSpec]:
        """Every role but the rollout."""
        return [role for role in self.roles.values() if not role.kind.generates]

    @property
    def trained(self) -> list[RoleSpec]:
        """The roles that a checkpoint keeps."""
        return [role for role in self.roles.values() if role.is_trained]

    @property
    def scores_beside_policy(self) -> bool:
        """Whether further roles read the batches of the policy."""
        return any(role.passes and not role.kind.is_sampled for role in self.roles.values())

    @property
    def num_towers(self) -> int:
        """How many vision towers read each image: that of the folder and, where it is trained, that of the policy."""
        return int(not self.leader.trains_tower or self.scores_beside_policy) + self.leader.trains_tower

    @property
    def reward_models(self) -> list[RoleSpec]:
        """Every classifier that gives a reward, `reward_model` first."""
        return [role for role in self.roles.values() if role.kind.gives_reward and not role.kind.judges]

    @property
    def judges(self) -> list[RoleSpec]:
        """Every judge that is a model of its own."""
        return [role for role in self.roles.values() if role.kind.judges]

    @property
    def teachers(self) -> list[RoleSpec]:
        """Every teacher."""
        return [role for role in self.roles.values() if role.kind.teaches]

    @property
    def followers(self) -> list[RoleSpec]:
        """Roles that take weights of a role in another pool."""
        return [role for role in self.roles.values() if role.follows is not None]

    @property
    def world_size(self) -> int:
        """Ranks of all pools."""
        return sum(pool.world_size for pool in self.pools.values())

    def pool_of(self, role: str) -> PoolSpec:
        """The pool that hosts a role."""
        return self.pools[self.roles[role].pool]


def pool_sizes(config: RunConfig) -> dict[str, PoolSize]:
    """Every defined pool, with or without a role. Pools of the user's own replace those of the same name."""
    sizes = {GLOBAL_POOL: _size("trainer", config.trainer)}
    if config.generates and config.actor_rollout_ref.hybrid_engine is False:
        sizes[ROLLOUT_POOL] = _size("actor_rollout_ref.rollout", config.actor_rollout_ref.rollout)
    if config.generates and config.reward_model.enable_resource_pool:
        sizes[REWARD_POOL] = _size("reward_model", config.reward_model)
    return sizes | {name: _size(f"pools.{name}", pool) for name, pool in config.pools.items()}


def _size(group: str, settings: Any) -> PoolSize:
    return PoolSize(settings.nnodes, settings.n_gpus_per_node, f"{group}.nnodes", f"{group}.n_gpus_per_node")


def rollout_pool(config: RunConfig) -> str:
    """The pool that generates: `rollout.pool`, or verl's if hybrid_engine=false and `rollout.pool` is not set."""
    shared = config.actor_rollout_ref
    says_nothing = shared.rollout.pool == shared.actor.pool
    return ROLLOUT_POOL if shared.hybrid_engine is False and says_nothing else shared.rollout.pool


def reward_pool(config: RunConfig) -> str:
    """The pool of `reward_model`: its `pool`, or verl's if enable_resource_pool=true and `pool` is not set."""
    reward = config.reward_model
    return REWARD_POOL if reward.enable_resource_pool and reward.pool == GLOBAL_POOL else reward.pool


def trained_roles(config: RunConfig) -> dict[str, str]:
    """Role that is trained and saved -> the Hugging Face folder that it starts from."""
    return {role.name: role.model_path for role in roles_of(config) if role.is_trained}


def followed_policies(config: RunConfig) -> set[str]:
    """Names of the roles to which a reference on the same ranks moves."""
    if not config.actor_rollout_ref.ref.sync_ref_model:
        return set()
    beside = (role for role in roles_of(config) if role.follows is None)
    return {role.kind.initial_of for role in beside if role.kind.initial_of is not None}


def roles_of(config: RunConfig) -> Iterator[RoleSpec]:
    """Every role of a run, in the order of building: the rollout comes after the actor, whose memory it may read."""
    roles = _task_roles(config) if isinstance(config, TaskConfig) else (role for rows in ROWS for role in rows(config))
    as_tree = config.actor_rollout_ref.model.enable_tree_training
    for role in roles:
        yield _laid_as_trees(role) if as_tree and role.kind.takes_trees else role


def _laid_as_trees(role: RoleSpec) -> RoleSpec:
    score, update = (None if spec is None else replace(spec, as_tree=True) for spec in (role.score, role.update))
    return replace(role, score=score, update=update)


TASK_CALLS = {
    SFT: (PassCall("log_likelihoods"), PassCall("update")),
    DPO: (PassCall("answer_log_probs", compares=True), PassCall("update_preferences", compares=True)),
    REWARD: (PassCall("scores", compares=True), PassCall("update", compares=True)),
}
"""Task without generation -> score and update of the role that it trains."""


def _task_roles(config: TaskConfig) -> Iterator[RoleSpec]:
    """The role that a task without generation trains, and the reference where it scores on the same ranks."""
    trains_scores, together = config.trainer.stage == REWARD, config.answers_together
    policy = replace(_actor(config), kind=KINDS[TUNED], mixed=None, mtp=MTPUse.NONE)
    role = replace(_critic(config), kind=KINDS[SCORER]) if trains_scores else policy
    longest = config.longest_sequence + trains_scores
    if role.update is not None and together > 1:
        update = replace(role.update, longest=together * longest, scored=together * config.longest_response)
        role = replace(role, update=update)
    score_call, update_call = TASK_CALLS[config.trainer.stage]
    if role.update is not None:
        role = replace(role, update=replace(role.update, call=update_call))
    if role.score is not None:
        phase, own = ("scores", longest) if trains_scores else ("log_probs", role.score.longest)
        role = replace(role, score=replace(role.score, phase=phase, call=score_call, longest=own, is_run=True))
        role = replace(role, score=_with_room(role, longest)) if trains_scores else role
    yield role
    if config.holds_reference:
        yield _reference(config)


LOG_PROB_KEYS = ("log_prob_use_dynamic_bsz", "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu")
VALUE_KEYS = ("use_dynamic_bsz", "forward_micro_batch_size_per_gpu", "forward_max_token_len_per_gpu")
SCORE_KEYS = ("use_dynamic_bsz", "micro_batch_size_per_gpu", "forward_max_token_len_per_gpu")
UPDATE_KEYS = ("use_dynamic_bsz", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu")
"""For each pass: the key that joins samples by their tokens, the key of samples, and the key of tokens."""


def _pass(phase: str, call: PassCall, packed: bool, group: str, settings: Any, keys: tuple[str, str, str]) -> PassSpec:
    """settings: the group that has the three keys."""
    dynamic, rows, tokens = keys
    is_dynamic = getattr(settings, dynamic)
    max_tokens = getattr(settings, tokens) if is_dynamic else None
    key = f"{group}.{tokens if is_dynamic else rows}"
    return PassSpec(phase, call, getattr(settings, rows), max_tokens, packed, key)


def _with_room(role: RoleSpec, longest: int) -> PassSpec | None:
    """The scoring pass with room for a sequence of `longest` tokens, cut over the context-parallel ranks."""
    if role.score is None or role.score.max_tokens is None:
        return role.score
    one_row = -(-longest // max(1, role.megatron.context_parallel_size))
    return replace(role.score, max_tokens=max(role.score.max_tokens, one_row))


def _policy(config: RunConfig, kind: str, key: str, pool: str, megatron: MegatronConfig, settings: Any) -> RoleSpec:
    """A role that starts from the actor's model."""
    shared = config.actor_rollout_ref
    model = (shared.model.path, "actor_rollout_ref.model.path", megatron, settings)
    return RoleSpec(kind, KINDS[kind], key, pool, *model, lora=shared.model.lora, mtp=shared.mtp_use)


def _actor(config: RunConfig) -> RoleSpec:
    shared, key = config.actor_rollout_ref, "actor_rollout_ref.actor"
    packed = shared.model.use_remove_padding
    call = PassCall("log_probs", (ACTOR_SCORES,), "old_log_probs")
    trained = PassCall("update", (ACTOR_UPDATE,), made_up=("old_log_probs", "ref_log_probs", "advantages"))
    score = _pass("old_log_prob", call, packed, "actor_rollout_ref.rollout", shared.rollout, LOG_PROB_KEYS)
    return replace(
        _policy(config, ACTOR, key, shared.actor.pool, shared.actor.megatron, shared.actor),
        score=replace(score, is_run=scores_old_log_probs(config)),
        update=_pass("update_actor", trained, packed, key, shared.actor, UPDATE_KEYS),
        mixed=Mixed(config.ptx.mini_batch_size, pretraining_length(config)) if config.ptx.coef else None,
    )


def pretraining_length(config: RunConfig) -> int:
    """Tokens of an example of `ptx.files` at most."""
    return config.longest_sequence if config.ptx.max_length is None else config.ptx.max_length


def _reference(config: RunConfig) -> RoleSpec:
    shared, key = config.actor_rollout_ref, "actor_rollout_ref.ref"
    role = _policy(config, REFERENCE, key, shared.ref.pool, shared.ref.megatron, shared.ref)
    call = PassCall("log_probs", (SCORING,), "ref_log_probs", is_added=True)
    score = _pass("ref", call, shared.model.use_remove_padding, key, shared.ref, LOG_PROB_KEYS)
    is_base = shared.model.lora.rank > 0 and shared.ref.pool == shared.actor.pool
    # It is the policy before training, of which new adapters are no part: their B is 0. One that follows holds them.
    is_bare = shared.model.lora.adapter_path is None and not shared.ref.sync_ref_model
    lora = LoraConfig() if is_bare else shared.model.lora
    follows = None
    if shared.ref.sync_ref_model and shared.ref.pool != shared.actor.pool:
        follows = Following(ACTOR, shared.ref.ref_model_mixup_alpha, shared.ref.ref_model_sync_steps, is_kept=True)
    model_of = ACTOR if is_base else None
    return replace(role, score=score, model_of=model_of, lora=lora, mtp=MTPUse.NONE, follows=follows)


def _critic(config: RunConfig) -> RoleSpec:
    critic = config.critic
    packed = critic.model.use_remove_padding
    call = PassCall("values", (SCORING,), "old_values", is_added=True)
    trained = PassCall("update", (CRITIC_UPDATE,), made_up=("old_values", "returns"))
    return RoleSpec(
        *(CRITIC, KINDS[CRITIC], CRITIC, critic.pool, critic.model.path, "critic.model.path", critic.megatron, critic),
        score=_pass("values", call, packed, CRITIC, critic, VALUE_KEYS),
        update=_pass("update_critic", trained, packed, CRITIC, critic, UPDATE_KEYS),
        lora=critic.model.lora,
    )


def _reward_models(config: RunConfig) -> Iterator[RoleSpec]:
    reward, longest = config.reward_model, config.longest_sequence
    models: list[tuple[str, str, ScoringModelConfig, str, str]] = []
    if reward.enable:
        models.append((REWARD_MODEL, REWARD_MODEL, reward, reward_pool(config), "rm_scores"))
    for name, further in config.reward_models.items():
        models.append((name, f"reward_models.{name}", further, further.pool, f"rm_scores_{name}"))
    for name, key, settings, pool, phase in models:
        if not settings.is_judge:
            yield _reward_model(name, key, settings, pool, phase, longest)
        elif not (settings.asks_policy or settings.judge.recorded):
            path = (settings.model.path, f"{key}.model.path", settings.megatron, settings)
            yield RoleSpec(name, KINDS[JUDGE], key, pool, *path)  # type: ignore[arg-type]


def _teachers(config: RunConfig) -> Iterator[RoleSpec]:
    if (way := teaching(config)) is not None:
        asked = (LOG_PROBS_AT,) if STUDENTS_TOP in distillation_reads(config) else ()
        for name, teacher in config.distillation.teacher_models.items():
            yield _teacher(config, name, teacher, PassCall(way.method, (SCORING, *asked), way.column))


def _teacher(config: RunConfig, name: str, teacher: TeacherConfig, call: PassCall) -> RoleSpec:
    """A frozen model that says more of the tokens than a reference; `self`: the actor, in its own pool or another."""
    shared, key = config.actor_rollout_ref, f"distillation.teacher_models.{name}"
    is_self = teacher.model_path == SELF
    is_here = is_self and teacher.pool == shared.actor.pool
    score = _pass(f"teacher_{name}", call, teacher.use_remove_padding, key, teacher, LOG_PROB_KEYS)
    prompt = config.data.max_prompt_length if teacher.prompt_key is None else teacher.max_prompt_length
    longest = prompt + config.data.max_response_length
    role = RoleSpec(
        *(name, KINDS[TEACHER], key, teacher.pool),
        model_path=shared.model.path if is_self else teacher.model_path,  # type: ignore[arg-type]
        model_key=f"{key}.model_path",
        megatron=shared.actor.megatron if is_here else teacher.megatron,
        settings=teacher,
        score=replace(score, longest=longest, length_key=f"{key}.max_prompt_length + data.max_response_length"),
        model_of=ACTOR if is_here else None,
        lora=shared.model.lora if is_self and not is_here else LoraConfig(),
        follows=Following(ACTOR, share=1.0, every=1, is_kept=False) if is_self and not is_here else None,
    )
    return replace(role, score=_with_room(role, longest))


def _rollout(config: RunConfig) -> RoleSpec:
    shared, key = config.actor_rollout_ref, "actor_rollout_ref.rollout"
    return _policy(config, ROLLOUT, key, rollout_pool(config), shared.actor.megatron, shared.rollout)


def _reward_model(name: str, key: str, settings: Any, pool: str, phase: str, longest: int) -> RoleSpec:
    """A frozen classifier. It reads one token more than the sequence has, for which its pass always has room.

    longest: tokens of the longest prompt with the longest response.
    """
    own = None
    if settings.model.input_tokenizer is not None:
        own = longest if settings.max_length is None else settings.max_length
    call = PassCall("scores", (SCORING,), "scores")
    score = _pass(phase, call, settings.model.use_remove_padding, key, settings, SCORE_KEYS)
    role = RoleSpec(
        *(name, KINDS[REWARD_MODEL], key, pool, settings.model.path, f"{key}.model.path", settings.megatron, settings),
        score=replace(score, extra_tokens=1, longest=own, length_key=f"{key}.max_length"),
    )
    return replace(role, score=_with_room(role, (own or longest) + 1))


ROWS: list[Callable[[RunConfig], Iterable[RoleSpec]]] = [
    lambda config: [_actor(config)],
    lambda config: [_reference(config)] if uses_reference(config) else [],
    lambda config: [_critic(config)] if uses_critic(config) else [],
    _reward_models,
    _teachers,
    lambda config: [_rollout(config)],
]
"""The roles of PPO: each row gives those that a configuration asks for. A role that only scores is one row, and its
call `is_added`."""


@dataclass(frozen=True)
class ElasticPool:
    """The replicas of a pool that join and leave: ranks of each, the fewest that are needed, the most."""

    replica: PoolSize
    min_replicas: int
    max_replicas: int

    @property
    def smallest(self) -> PoolSize:
        """The size with which the run can continue."""
        return replace(self.replica, num_nodes=self.replica.num_nodes * self.min_replicas)


def elastic_pools(config: RunConfig) -> dict[str, ElasticPool]:
    """Pool whose replicas join and leave -> their numbers; {} where all stay."""
    rollout = config.actor_rollout_ref.rollout
    if not (config.generates and rollout.is_elastic):
        return {}
    name, num_ranks = rollout_pool(config), rollout.replica_size
    size = pool_sizes(config)[name]
    ranks_per_node = min(num_ranks, size.num_ranks_per_node)
    replica = replace(size, num_nodes=-(-num_ranks // ranks_per_node), num_ranks_per_node=ranks_per_node)
    return {name: ElasticPool(replica, rollout.min_replicas, rollout.max_replicas or size.world_size // num_ranks)}


def needed_pools(config: RunConfig) -> list[PoolSpec]:
    """Every pool with the size that the run cannot do without: of replicas that come and go the fewest."""
    elastic, pools = elastic_pools(config), Placement.of(config).pools
    return [replace(pool, size=elastic[name].smallest) if name in elastic else pool for name, pool in pools.items()]
