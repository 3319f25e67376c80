"""What a run plans for losses: host memory for copies of the state, and replicas that come and go."""

from __future__ import annotations

from megatron_rl.config.roles import Placement, elastic_pools
from megatron_rl.config.schema import RunConfig
from megatron_rl.planning.plan_tables import amount
from megatron_rl.planning.run_models import PoolModels

KEPT_STEPS = 2
"""Copies of a rank's state: of the newest step, and of the one before, or of the next that is being written."""


def copied_bytes(pool: PoolModels) -> int:
    """Return the bytes that the largest rank of a pool copies after a step."""
    trained = [pool.ledger(role) for role in pool.spec.roles if role.is_trained]
    return max(sum(ledger.saved_bytes(stage) for ledger in trained) for stage in range(pool.grid.pp_size))


def elastic_notes(config: RunConfig) -> list[str]:
    """A sentence about every pool whose replicas come and go."""
    pools = Placement.of(config).pools
    return [
        f"{pool.min_replicas} to {pool.max_replicas} replicas of {pool.replica.world_size} rank(s) in {name}: they "
        f"come and go, and this plan counts with {pools[name].world_size // pool.replica.world_size}"
        for name, pool in elastic_pools(config).items()
    ]


def repair_notes(config: RunConfig, pools: dict[str, PoolModels]) -> list[str]:
    """Sentences about host memory for copies; none where nothing is copied."""
    trainer, notes = config.trainer, []
    if not trainer.max_repairs or trainer.copy_freq < 0:
        return []
    for name, pool in pools.items():
        size, copied = pool.spec.size, copied_bytes(pool)
        if copied:
            num_places = 2 if size.num_nodes > 1 else 1
            held = copied * size.num_ranks_per_node * KEPT_STEPS * num_places
            where = "its own and another node's ranks" if num_places == 2 else "its ranks"
            notes.append(
                f"copies for repairs (trainer.copy_freq={trainer.copy_freq}): {amount(copied)} a rank of {name}, "
                f"{amount(held)} of host memory a node for two steps of {where}"
            )
    return notes
