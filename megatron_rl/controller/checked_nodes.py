"""Which runs check their nodes, and by which rules: keys of `trainer`, and what the plan needs. No torch."""

from __future__ import annotations

from megatron_rl.config.roles import Placement
from megatron_rl.config.schema import RunConfig
from megatron_rl.node_check.node_report import ACROSS, INSIDE, PAIR
from megatron_rl.node_check.node_rules import NodeRules
from megatron_rl.planning.hardware import planned_hardware
from megatron_rl.planning.memory import planned_memory

FLOOR_SHARE = 0.1
"""Share of the planned bandwidth that must be there where no floor is set. NCCL over sockets and GPUs without NVLink
reach less, and a network of a quarter of the data sheet's more."""


def checks_nodes(config: RunConfig) -> bool:
    """Whether a run checks its nodes before it builds roles: as `trainer.cluster_check` says."""
    trainer = config.trainer
    several = any(pool.size.num_nodes > 1 for pool in Placement.of(config).pools.values())
    return trainer.device == "cuda" and several if trainer.cluster_check is None else trainer.cluster_check


def rules_of(config: RunConfig) -> NodeRules:
    """Return the rules of a run. The configuration must have passed preflight. Raises ConfigError as
    `planned_hardware`.
    """
    trainer, hardware = config.trainer, planned_hardware(config)
    on_gpus = trainer.device == "cuda"
    per_node = {pool.size.num_ranks_per_node for pool in Placement.of(config).pools.values()}
    planned = {
        INSIDE: (trainer.min_link_bandwidth_gbs, hardware.link_bandwidth),
        ACROSS: (trainer.min_node_bandwidth_gbs, hardware.network_bandwidth * min(per_node)),
    }
    floors = {
        kind: FLOOR_SHARE * rate / 1e9 if given is None else given
        for kind, (given, rate) in planned.items()
        if on_gpus or given is not None
    }
    if ACROSS in floors:
        floors[PAIR] = floors[ACROSS]
    if not on_gpus:
        return NodeRules(on_gpus, floors)
    needed = {
        pool: int(max(sum(held.values()) for held in phases.values()) + hardware.context_bytes)
        for pool, phases in planned_memory(config).items()
    }
    return NodeRules(on_gpus, floors, needed)
