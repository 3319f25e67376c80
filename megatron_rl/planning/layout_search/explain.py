"""`map --explain KEY`: the best placement for every other value of one key, on the same pools."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.config.keys import put, value_of
from megatron_rl.config.problems import divisors, nearest_name
from megatron_rl.errors import ConfigError, shown
from megatron_rl.planning.layout_search.exact_ranking import Candidate, Finalists
from megatron_rl.planning.layout_search.grids import CHUNKS, MOST_CONTEXT_RANKS
from megatron_rl.planning.layout_search.request import MapRequest
from megatron_rl.planning.layout_search.search import Search
from megatron_rl.planning.layout_search.search_problem import Keeps
from megatron_rl.planning.layout_search.search_result import SearchResult
from megatron_rl.planning.preflight import preflight


@dataclass(frozen=True)
class Other:
    """One value of the key. candidate: the best placement with it; None: none fits, for the reason in `why`."""

    value: Any
    candidate: Candidate | None
    why: str


def explain(mapped: SearchResult, key: str) -> list[Other]:
    """Try every value of a key, the winner's first. Raises ConfigError for a key that the search does not decide."""
    winner = mapped.candidates[0]
    if key not in winner.settings:
        nearest = nearest_name(key, winner.settings)
        raise ConfigError(f"--explain {key} must be a key that the search decides; did you mean: --explain {nearest}")
    values = values_of(mapped.request, key, winner.settings[key])
    others = [_other(mapped.request, winner, key, value) for value in values]
    return [Other(winner.settings[key], winner, "chosen"), *others]


def values_of(request: MapRequest, key: str, chosen: Any) -> Iterator[Any]:
    """Yield the other values to try for a key."""
    name = key.rpartition(".")[2]
    tried: list[Any]
    if isinstance(chosen, bool):
        tried = [not chosen]
    elif name == "tensor_model_parallel_size":
        tried = divisors(request.cluster.per_node)
    elif name in ("pipeline_model_parallel_size", "expert_model_parallel_size"):
        tried = [size for size in divisors(request.cluster.num_ranks) if size <= 32]
    elif name == "context_parallel_size":
        tried = [size for size in divisors(request.cluster.num_ranks) if size <= MOST_CONTEXT_RANKS]
    elif name == "virtual_pipeline_model_parallel_size":
        tried = [None, *CHUNKS]
    elif name == "recompute_granularity":
        tried = [None, "full"]
    elif name == "rollout_ahead":
        tried = [0, 1]
    elif name == "nnodes":
        tried = sorted({1, request.cluster.num_nodes, max(1, chosen // 2), min(request.cluster.num_nodes, 2 * chosen)})
    elif name == "pool":
        tried = ["global_pool", key.split(".")[-2]]
    elif isinstance(chosen, int):
        tried = [max(1, chosen // 2), 2 * chosen]
    else:
        tried = []
    yield from (value for value in tried if value != chosen)


def _other(request: MapRequest, winner: Candidate, key: str, value: Any) -> Other:
    config = copy.deepcopy(request.config)
    broken = copy.deepcopy(winner.config)
    put(config, key, value)
    put(broken, key, value)
    kept = Keeps({**request.keeps.values, key: value_of(config, key)})
    work = replace(request, config=config, keeps=kept).work
    search = Search(work)
    blocks = {choice.block for choice in winner.placed.choices}
    if not key.endswith(".pool"):
        search.partitions = [each for each in search.partitions if set(each) == blocks]
    best = Finalists(work, search.names).best(search.run(), 1)
    if best:
        return Other(value, best[0], f"{best[0].seconds - winner.seconds:+.2f} s a step")
    rules = [str(each) for each in preflight(broken, config_only=True) if key in each.settings]
    return Other(value, None, rules[0] if rules else "no layout with it fits these pools")


def lines(others: list[Other], key: str) -> list[str]:
    """Return one sentence for each value."""
    sentences = []
    for other in others:
        seconds = "" if other.candidate is None else f"{other.candidate.seconds:.2f} s, "
        sentences.append(f"{key}={shown(other.value)}: {seconds}{other.why}")
    return sentences


def explained(others: list[Other]) -> list[dict[str, Any]]:
    """Return value, seconds and reason of each value as data."""
    return [
        {
            "value": other.value,
            "step_seconds": None if other.candidate is None else other.candidate.seconds,
            "why": other.why,
        }
        for other in others
    ]
