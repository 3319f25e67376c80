"""Rules of placement: defined pools that have roles, their sizes, and verl's keys that define a pool."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_rl.config.keys import ACTOR
from megatron_rl.config.keys import ROLLOUT as ROLLOUT_KEY
from megatron_rl.config.problems import nearest_name
from megatron_rl.config.reward_keys import scoring_key
from megatron_rl.config.role_kinds import KINDS
from megatron_rl.config.roles import (
    REWARD_MODEL,
    REWARD_POOL,
    ROLLOUT_POOL,
    PoolSize,
    PoolSpec,
    RoleSpec,
    pool_sizes,
    roles_of,
    rollout_pool,
)
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.trainer import GLOBAL_POOL, MOST_RANKS, RANKS
from megatron_rl.errors import Violation, shown

OWN_POOLS = {
    GLOBAL_POOL: "trainer.nnodes and trainer.n_gpus_per_node",
    ROLLOUT_POOL: "actor_rollout_ref.hybrid_engine=false",
    REWARD_POOL: "reward_model.enable_resource_pool=true",
}
"""Pools that `pools` cannot define -> the keys that define them."""
OWN_ROLES = tuple(kind.name for kind in KINDS.values() if kind.names_a_role)
HYBRID = "actor_rollout_ref.hybrid_engine"


def countable_pools(config: RunConfig) -> list[PoolSpec]:
    """Pools with roles whose ranks other rules can count: the pool is defined, and its size is valid."""
    sizes, roles = pool_sizes(config), list(roles_of(config))
    names = dict.fromkeys(role.pool for role in roles if role.pool in sizes)
    return [
        PoolSpec(name, sizes[name], tuple(role for role in roles if role.pool == name))
        for name in names
        if _is_countable(sizes[name])
    ]


def _is_countable(size: PoolSize) -> bool:
    return all(RANKS.holds(number) for number in (size.num_nodes, size.num_ranks_per_node, size.world_size))


def pool_problems(config: RunConfig) -> Iterable[Violation]:
    """Every violation of placement. The cluster checks whether the machines exist."""
    yield from _name_problems(config)
    sizes, roles = pool_sizes(config), list(roles_of(config))
    yield from _product_problems(sizes)
    offered = set()
    for role in roles:
        if role.pool not in sizes:
            nearest = nearest_name(role.pool, sizes)
            offered.add(nearest)
            rule = f"must be a pool that is defined: {', '.join(sizes)}"
            yield Violation({f"{role.key}.pool": role.pool}, rule, {f"{role.key}.pool": nearest}, wrong_name=True)
    for name in config.pools:
        if name not in {*OWN_POOLS, *offered} and not any(role.pool == name for role in roles):
            yield _without_role(name, sizes[name])
    if config.generates:
        yield from _rollout_problems(config, roles)
        yield from _reward_pool_problems(config, roles)
        yield from _judge_problems(roles, config)


def _name_problems(config: RunConfig) -> Iterable[Violation]:
    """The user's names that are already used."""
    for name in config.pools:
        if name in OWN_POOLS:
            settings = {f"pools.{name}.nnodes": config.pools[name].nnodes}
            yield Violation(settings, f"is the size of a pool that {OWN_POOLS[name]} defines", hint="rename the pool")
    for name, reward in config.reward_models.items() if config.generates else ():
        model = {f"reward_models.{name}.model.path": reward.model.path}
        if name in OWN_ROLES:
            rule = f"must belong to a reward model of another name: {name} is a role already"
            yield Violation(model, rule, hint=f"rename it, such as reward_models.{name}_2")
        elif not name.isidentifier():
            rule = f"must belong to a reward model whose name is a Python identifier, and {name!r} is none"
            yield Violation(model, rule, hint=f"rename it, such as reward_models.{_identifier(name)}")


def _identifier(name: str) -> str:
    letters = "".join(letter if letter.isidentifier() or letter.isdigit() else "_" for letter in name)
    return letters if letters.isidentifier() else f"model_{letters}"


def _product_problems(sizes: dict[str, PoolSize]) -> Iterable[Violation]:
    """Pools with valid numbers of machines and of ranks per machine, but too many ranks in total."""
    for name, size in sizes.items():
        nodes, ranks = size.num_nodes, size.num_ranks_per_node
        if RANKS.holds(nodes) and RANKS.holds(ranks) and not _is_countable(size):
            rule = f"are {size.world_size} ranks of pool {name}, and must be at most {MOST_RANKS}"
            nearest = {size.nodes_key: MOST_RANKS // ranks, size.ranks_key: ranks}
            yield Violation({size.nodes_key: nodes, size.ranks_key: ranks}, rule, nearest)


def _without_role(name: str, size: PoolSize) -> Violation:
    settings = {size.nodes_key: size.num_nodes, size.ranks_key: size.num_ranks_per_node}
    hint = f"leave pools.{name} out, or let a role live there, such as with critic.pool={name}"
    return Violation(settings, "are the size of a pool without roles", hint=hint)


def _rollout_problems(config: RunConfig, roles: list[RoleSpec]) -> Iterable[Violation]:
    """hybrid_engine, rollout.pool and rollout.nnodes: verl's keys and ours for one thing."""
    shared = config.actor_rollout_ref
    rollout, hybrid, actor_pool = shared.rollout, shared.hybrid_engine, shared.actor.pool
    nodes_key, pool_key = f"{ROLLOUT_KEY}.nnodes", f"{ROLLOUT_KEY}.pool"
    where = rollout_pool(config)
    if hybrid is True and rollout.pool != actor_pool:
        rule = f"do not go together: true means that the rollout is in the actor's pool, {ACTOR}.pool={actor_pool}"
        yield Violation({pool_key: rollout.pool, HYBRID: True}, rule, {HYBRID: None})
    if hybrid is not False and rollout.nnodes > 0:
        rule = f"must be 0, as {HYBRID}={shown(hybrid)}: only false gives the rollout a pool of its own, {ROLLOUT_POOL}"
        yield Violation({nodes_key: rollout.nnodes}, rule, {nodes_key: 0}, f"or set {HYBRID}=false")
    elif hybrid is False and where != ROLLOUT_POOL and rollout.nnodes > 0:
        rule = "both place the rollout"
        yield Violation({pool_key: rollout.pool, nodes_key: rollout.nnodes}, rule, {nodes_key: 0})
    if hybrid is False:
        reason = f"as {HYBRID}=false gives the rollout a pool of its own"
        yield from _made_pool_problems(config, roles, ROLLOUT_POOL, reason)


def _reward_pool_problems(config: RunConfig, roles: list[RoleSpec]) -> Iterable[Violation]:
    """enable_resource_pool, pool and nnodes of reward_model: verl's keys and ours for one thing."""
    reward = config.reward_model
    if not reward.enable:
        return
    nodes_key, own_key = f"{REWARD_MODEL}.nnodes", f"{REWARD_MODEL}.enable_resource_pool"
    if not reward.enable_resource_pool and reward.nnodes > 0:
        rule = f"must be 0, as {own_key}=false: only true gives the reward model a pool of its own, {REWARD_POOL}"
        yield Violation({nodes_key: reward.nnodes}, rule, {nodes_key: 0}, f"or set {own_key}=true")
    elif reward.enable_resource_pool and reward.pool not in (GLOBAL_POOL, REWARD_POOL) and reward.nnodes > 0:
        settings = {f"{REWARD_MODEL}.pool": reward.pool, nodes_key: reward.nnodes}
        yield Violation(settings, "both place the reward model", {nodes_key: 0})
    if reward.enable_resource_pool:
        reason = f"as {own_key}=true gives the reward model a pool of its own"
        yield from _made_pool_problems(config, roles, REWARD_POOL, reason)


def _judge_problems(roles: list[RoleSpec], config: RunConfig) -> Iterable[Violation]:
    """Judges among ranks that generate all the time."""
    actor, where = config.actor_rollout_ref.actor.pool, rollout_pool(config)
    for role in roles:
        if role.kind.judges and role.pool == where != actor and config.trainer.rollout_ahead:
            reason = "is the pool of replicas, which generate while others train and have no time for a judge"
            hint = f"try: {role.key}.pool={actor}, or a pool of its own"
            yield Violation({f"{role.key}.pool": role.pool}, reason, hint=hint)
    filters = "algorithm.filter_groups.enable"
    if not (config.algorithm.filter_groups.enable and config.samples_ahead and where != actor):
        return
    for name, judge in config.judges.items():
        if judge.asks_policy:
            key = f"{scoring_key(name)}.model.path"
            reason = (
                "cannot score groups for dynamic sampling: replicas reply by a schedule that waits for the verdicts"
            )
            yield Violation(
                {key: judge.model.path, filters: True}, reason, {filters: False}, "or a folder as the judge"
            )


def _made_pool_problems(config: RunConfig, roles: list[RoleSpec], name: str, reason: str) -> Iterable[Violation]:
    """The size of a pool that verl's keys define, if it hosts a role."""
    if name in config.pools or not any(role.pool == name for role in roles):
        return
    size = pool_sizes(config)[name]
    if 0 <= size.num_nodes < 1:
        yield Violation({size.nodes_key: size.num_nodes}, f"must be >= 1, {reason}", {size.nodes_key: 1})
    # Numbers below 0 break the key's own range.
    key, number = size.ranks_key, size.num_ranks_per_node
    if not RANKS.holds(number):
        yield Violation({key: number}, f"must be {RANKS}", {key: RANKS.nearest(number)})
