"""Seconds of a transition in closed form; what is offered is counted again by the exchange plan itself.

in place       a rank receives M / t_g less what it holds; what its node lacks crosses the network once for the
               node's ranks that need the same, and is passed on inside
between pools  a rollout rank receives M / t_g; training sends each stage once, spread over the stage's ranks
"""

from __future__ import annotations

import math

from megatron_rl.ledger.mapping.grids import Grid, GridShape
from megatron_rl.ledger.mapping.map_work import MapWork
from megatron_rl.ledger.mapping.shards import ActorBytes
from megatron_rl.ledger.planner.time import LINK_EFFICIENCY


def in_place_seconds(work: MapWork, actor: ActorBytes, grid: Grid, shape: GridShape, rollout_tp: int) -> float:
    """Of the rank that lacks most: one of a stage between the ends, which hold vocabularies."""
    stage_size = shape.num_ranks // grid.pp
    together = math.lcm(grid.tp, rollout_tp) // rollout_tp
    own = actor.stage(work.actor, grid, min(1, grid.pp - 1))
    lacking = actor.model / rollout_tp - (own / grid.tp if rollout_tp <= grid.tp else 0.0)
    on_node = max(1, min(grid.pp, shape.per_node // stage_size))
    # Stages of a node want other shards where a rollout TP group spans them.
    different = min(on_node, rollout_tp // math.gcd(rollout_tp, stage_size))
    shared = together * on_node / different
    beyond = actor.model - own * on_node if on_node < grid.pp else 0.0
    far = max(0.0, beyond / rollout_tp / shared)
    near = max(0.0, lacking - far)
    gpu = work.hardware
    return (far / gpu.network_bandwidth + near / gpu.link_bandwidth) / LINK_EFFICIENCY


def received_seconds(work: MapWork, shard: int) -> float:
    """A rollout rank's side of a bridge."""
    return shard / work.hardware.network_bandwidth / LINK_EFFICIENCY


def sent_seconds(work: MapWork, actor: ActorBytes, grid: Grid, shape: GridShape) -> float:
    """A training rank's side of a bridge."""
    stages = (actor.stage(work.actor, grid, pp_rank) for pp_rank in {0, min(1, grid.pp - 1), grid.pp - 1})
    return max(stages) / (shape.num_ranks // grid.pp) / work.hardware.network_bandwidth / LINK_EFFICIENCY
