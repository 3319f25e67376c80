"""Pools whose replicas join and leave, and the sizes without which a run cannot be."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_rl.config.roles import Placement, PoolSize, PoolSpec, pool_sizes, rollout_pool
from megatron_rl.config.schema import RunConfig


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
    name, tp_size = rollout_pool(config), rollout.tensor_model_parallel_size
    size = pool_sizes(config)[name]
    ranks_per_node = min(tp_size, size.num_ranks_per_node)
    replica = replace(size, num_nodes=-(-tp_size // ranks_per_node), num_ranks_per_node=ranks_per_node)
    return {name: ElasticPool(replica, rollout.min_replicas, rollout.max_replicas or size.world_size // tp_size)}


def needed_pools(config: RunConfig) -> list[PoolSpec]:
    """Every pool with the size that the run cannot do without: of replicas that come and go the fewest."""
    elastic, pools = elastic_pools(config), Placement.of(config).pools
    return [replace(pool, size=elastic[name].smallest) if name in elastic else pool for name, pool in pools.items()]
