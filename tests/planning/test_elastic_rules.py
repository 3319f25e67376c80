"""Rules of replicas that join and leave: what is refused, with the nearest value that is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.config.load import load_config
from megatron_rl.config.roles import elastic_pools, needed_pools
from megatron_rl.config.schema import RunConfig
from megatron_rl.planning.plan_sections import elastic_notes
from megatron_rl.planning.preflight import preflight

ROLLOUT = "actor_rollout_ref.rollout"
ASYNC = Path("configs/async_cpu.yaml")


def loaded(*overrides: str, config: Path = ASYNC) -> RunConfig:
    return load_config(config, overrides)


@pytest.mark.parametrize(
    ("overrides", "named", "nearest"),
    [
        ((f"{ROLLOUT}.max_replicas=3",), f"{ROLLOUT}.min_replicas", f"{ROLLOUT}.min_replicas=1"),
        ((f"{ROLLOUT}.min_replicas=3",), "must be <= the 2 replicas of the pool", f"{ROLLOUT}.min_replicas=2"),
        (
            (f"{ROLLOUT}.min_replicas=5", f"{ROLLOUT}.max_replicas=4"),
            f"must be <= {ROLLOUT}.max_replicas=4",
            f"{ROLLOUT}.min_replicas=4",
        ),
        *(
            ((f"{ROLLOUT}.min_replicas=1", f"{ROLLOUT}.drain_url='{url}'"), why, f"{ROLLOUT}.drain_url=null")
            for url, why in {
                "http://me:pw@host/a b": "drain_url=http://***@host/a b has spaces",
                "http://host:x/": "has another port",
                "file:///tmp/drain": "does not begin with http:// or https://",
                "http://?token=pw": "drain_url=http://?token=*** names no host",
            }.items()
        ),
    ],
)
def test_what_is_refused(overrides: tuple[str, ...], named: str, nearest: str) -> None:
    problems = "\n".join(map(str, preflight(loaded(*overrides))))
    key, _, value = nearest.partition("=")
    assert named in problems and problems.endswith((f"try: {value}", f"try: {nearest}")), problems
    assert preflight(loaded(*overrides, f"{key}={value}")) == []


def test_the_plan_says_with_how_many_it_counts() -> None:
    """Two replicas of the pool, of which one is needed and five may come; nothing where all stay."""
    keys = (f"{ROLLOUT}.min_replicas=1", f"{ROLLOUT}.max_replicas=5")
    note = "1 to 5 replicas of 1 rank(s) in rollout_pool: they come and go, and this plan counts with 2"
    assert elastic_notes(loaded(*keys)) == [note]
    assert elastic_notes(loaded()) == []


def test_the_ranks_that_a_run_needs() -> None:
    """TP2 on nodes of four: a replica is half a node; TP8: two nodes. By hand."""
    keys = (f"{ROLLOUT}.nnodes=4", f"{ROLLOUT}.n_gpus_per_node=4", f"{ROLLOUT}.min_replicas=1")
    pool = elastic_pools(loaded(*keys, f"{ROLLOUT}.tensor_model_parallel_size=2"))["rollout_pool"]
    assert (pool.min_replicas, pool.max_replicas) == (1, 8)
    assert (pool.replica.num_nodes, pool.replica.num_ranks_per_node) == (1, 2)
    config = loaded(*keys[:2], f"{ROLLOUT}.tensor_model_parallel_size=8", f"{ROLLOUT}.min_replicas=2")
    pool = elastic_pools(config)["rollout_pool"]
    assert (pool.replica.num_nodes, pool.replica.num_ranks_per_node, pool.max_replicas) == (2, 4, 2)
    sizes = {spec.name: spec.size.world_size for spec in needed_pools(config)}
    assert sizes == {"global_pool": 2, "rollout_pool": 16}
    assert elastic_pools(loaded()) == {}
