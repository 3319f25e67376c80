"""Copies of the trained state that repairs begin from: their bytes in the shared memory of a node."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_rl.config.schema import RunConfig
from megatron_rl.planning.memory_report import amount
from megatron_rl.planning.run_models import PoolModels

KEPT_STEPS = 2
"""Copies of a rank's state: of the newest step, and of the one before, or of the next that is being written."""
LESS_ROOM = (
    "a larger /dev/shm (docker run --shm-size=, or an emptyDir with medium: Memory), or trainer.copy_freq=-1, with "
    "which a repair begins from a checkpoint"
)


def copied_bytes(pool: PoolModels) -> int:
    """Return the bytes that the largest rank of a pool copies after a step, to be repaired from."""
    trained = [pool.ledger(role) for role in pool.spec.roles if role.is_trained]
    return max(sum(ledger.saved_bytes(stage) for ledger in trained) for stage in range(pool.grid.pp_size))


def copied_on_node(config: RunConfig, pools: Mapping[str, PoolModels]) -> dict[str, int]:
    """Return pool -> bytes in the shared memory of each of its nodes; {} where nothing is copied.

    Of two steps, and on several nodes also those of another node's ranks.
    """
    trainer = config.trainer
    if not trainer.max_repairs or trainer.copy_freq < 0:
        return {}
    held = {}
    for name, pool in pools.items():
        num_places = 2 if pool.spec.size.num_nodes > 1 else 1
        held[name] = copied_bytes(pool) * pool.spec.size.num_ranks_per_node * KEPT_STEPS * num_places
    return {name: size for name, size in held.items() if size}


def copied_here(config: RunConfig, pools: Mapping[str, PoolModels]) -> int:
    """Return the bytes of all copies on a machine that is a node of the run, at least: pools on one node share it."""
    held = copied_on_node(config, pools)
    if all(pools[name].spec.size.num_nodes == 1 for name in held):
        return sum(held.values())
    return max(held.values())


def repair_notes(config: RunConfig, pools: Mapping[str, PoolModels]) -> list[str]:
    """Return sentences about host memory for copies of the state; none where nothing is copied."""
    notes = []
    for name, held in copied_on_node(config, pools).items():
        several = pools[name].spec.size.num_nodes > 1
        where = "its own and another node's ranks" if several else "its ranks"
        notes.append(
            f"copies for repairs (trainer.copy_freq={config.trainer.copy_freq}): {amount(copied_bytes(pools[name]))} a "
            f"rank of {name}, {amount(held)} of /dev/shm a node for two steps of {where}"
        )
    return notes


def shared_memory_problem(needed: int, free: int) -> str:
    """Return what is wrong with a node's shared memory, and what to change; "" for nothing. Bytes."""
    if free >= needed:
        return ""
    return (
        f"copies for repairs (trainer.max_repairs) need {amount(needed)} of /dev/shm, which has {amount(free)} free; "
        f"try: {LESS_ROOM}"
    )
