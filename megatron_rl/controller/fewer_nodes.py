"""Configurations of a run on fewer nodes: fewer data-parallel ranks, and more micro-batches of the same samples."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

from megatron_rl.config.elastic_pools import needed_pools
from megatron_rl.config.roles import PoolSize
from megatron_rl.config.schema import RunConfig
from megatron_rl.planning.preflight import preflight


def smaller(config: RunConfig) -> Iterator[RunConfig]:
    """Yield copies of the configuration with fewer nodes of global_pool that preflight accepts, the largest first.

    Batches keep their samples, mini-batches and micro-batches their sizes: what changes is who computes them.
    """
    for num_nodes in range(config.trainer.nnodes - 1, 0, -1):
        fewer = copy.deepcopy(config)
        fewer.trainer.nnodes = num_nodes
        if not preflight(fewer):
            yield fewer


def sizes_of(config: RunConfig) -> Sequence[PoolSize]:
    """Sizes of the pools that a run needs."""
    return [pool.size for pool in needed_pools(config)]
