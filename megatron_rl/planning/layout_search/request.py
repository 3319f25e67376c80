"""The checked input of `map`: the configuration, the cluster, and kept values."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config.keys import leaf_of, put
from megatron_rl.config.load import Reading, read_override, read_run
from megatron_rl.config.problems import raise_problems, refused
from megatron_rl.config.roles import REWARD_POOL, ROLLOUT_POOL
from megatron_rl.config.schema import PoolConfig, RunConfig
from megatron_rl.config.setting import TAKEN_AWAY, Setting
from megatron_rl.config.trainer import GLOBAL_POOL
from megatron_rl.errors import ConfigError, Violation
from megatron_rl.planning.checked_config import only_ppo
from megatron_rl.planning.hardware import Hardware
from megatron_rl.planning.hub_cache import with_local_models
from megatron_rl.planning.layout_search.search_problem import ClusterSize, Keeps, SearchProblem
from megatron_rl.planning.merge_choice import with_merge_chosen
from megatron_rl.planning.preflight import preflight

REFUSED = "this run cannot be placed"
NODE = 8
"""Default GPUs of a machine."""
MOST_GPUS = 16_384
SEARCHED = re.compile(
    r"(.*\.)?pool|pools\..*|trainer\.(nnodes|n_gpus_per_node|rollout_ahead)"
    r"|actor_rollout_ref\.(hybrid_engine|rollout\.(nnodes|n_gpus_per_node|tensor_model_parallel_size"
    r"|kv_cache_memory_bytes|gpu_memory_utilization|drop_train_weights))"
    r"|reward_model\.(nnodes|n_gpus_per_node|enable_resource_pool)"
    r"|.*\.megatron\.(tensor|context|pipeline|virtual_pipeline|expert|expert_tensor)_(model_)?parallel_size"
    r"|.*\.megatron\.(virtual_pipeline_model_parallel_size|num_layers_in_(first|last)_pipeline_stage|sequence_parallel)"
    r"|.*\.megatron\.(param|grad|optimizer)_offload|.*\.recompute_(granularity|method|num_layers|modules)"
    r"|.*_per_gpu"
)
"""Keys that the search decides."""


@dataclass(frozen=True)
class MapRequest:
    """A user's request to `map`.

    path: of the configuration. overrides: the kept values as text. settings: those of the file and the overrides, under
    the schema's keys. config: as read. lengths: mean tokens of prompt and
    response. per_node: --gpus-per-node.
    """

    path: Path
    overrides: tuple[str, ...]
    settings: tuple[Setting, ...]
    config: RunConfig
    hardware: Hardware
    cluster: ClusterSize
    keeps: Keeps
    lengths: tuple[float, float]
    per_node: int | None = None

    @property
    def work(self) -> SearchProblem:
        """A new problem for the search."""
        return SearchProblem(self.config, self.hardware, self.cluster, self.lengths, self.keeps)


def read_base(path: Path, keep: Sequence[str]) -> tuple[Reading, RunConfig, Keeps]:
    """Read the configuration with the kept values as overrides; return the reading, the configuration with model
    folders of this machine, and the kept values.

    Raises ConfigError for every fault that no placement can mend.
    """
    reading = read_run(path, keep)
    raise_problems(f"cannot use {path}", reading.violations)
    assert reading.config is not None  # it has no violations
    config, _ = with_merge_chosen(only_ppo(with_local_models(reading.config), "map"), reading.given)
    keeps = Keeps.of(config, [*reading.overrides, *keys_taken_away(keep)])
    for pool in set(keeps.pools.values()) - {GLOBAL_POOL, ROLLOUT_POOL, REWARD_POOL, *config.pools}:
        config.pools[pool] = PoolConfig()  # the search sets its size
    lasting = [one for one in preflight(config, config_only=True) if not any(map(SEARCHED.fullmatch, one.settings))]
    raise_problems(REFUSED, lasting)
    return reading, config, keeps


def keys_taken_away(overrides: Sequence[str]) -> list[str]:
    """Return the keys of the schema that `~key` sets back to their defaults."""
    settings = (setting for text in overrides for setting in read_override(text))
    return [setting.key for setting in settings if setting.value is TAKEN_AWAY and leaf_of(setting.key) is not None]


def contradictions(request: MapRequest) -> list[Violation]:
    """Return the rules that kept values break by themselves, on one pool of all ranks."""
    config = copy.deepcopy(request.config)
    cluster, kept = request.cluster, request.keeps.values
    for key, value in (("trainer.nnodes", cluster.num_nodes), ("trainer.n_gpus_per_node", cluster.per_node)):
        if key not in kept:
            put(config, key, value)
    return [
        one
        for one in preflight(config, config_only=True)
        if all(key in kept for key in one.settings if SEARCHED.fullmatch(key))
    ]


def cluster_of(config: RunConfig, gpus: int, per_node: int | None, keeps: Keeps) -> ClusterSize:
    """Return the cluster: machines of 8 GPUs, or of all if there are fewer; on CPUs one machine. Raises ConfigError."""
    if not 1 <= gpus <= MOST_GPUS:
        nearest = min(max(1, gpus), MOST_GPUS)
        raise ConfigError(f"--gpus {gpus} must be >= 1 and <= {MOST_GPUS}; try: --gpus {nearest}")
    if per_node is not None and not 1 <= per_node <= gpus:
        nearest = min(max(1, per_node), gpus)
        raise ConfigError(f"--gpus-per-node {per_node} must be >= 1 and <= {gpus}; try: --gpus-per-node {nearest}")
    node = per_node or (gpus if config.trainer.device == "cpu" else min(NODE, gpus))
    if gpus % node:
        fewer = gpus // node * node
        raise ConfigError(f"--gpus {gpus} must be a multiple of the {node} of a machine; try: --gpus {fewer}")
    sizes = {"trainer.nnodes": 1, "trainer.n_gpus_per_node": 1} | {
        key: int(value) for key, value in keeps.values.items() if key in ("trainer.nnodes", "trainer.n_gpus_per_node")
    }
    if sizes["trainer.nnodes"] * sizes["trainer.n_gpus_per_node"] > gpus:
        kept = {key: value for key, value in sizes.items() if key in keeps.values}
        raise refused(Violation(kept, f"must be a pool of at most the {gpus} GPUs of --gpus", {"trainer.nnodes": 1}))
    return ClusterSize(gpus // node, node)
