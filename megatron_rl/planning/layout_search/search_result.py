"""The result of `map`: the best placements and their lower bound, or how many bytes are missing if nothing fits."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_rl.config.problems import raise_problems
from megatron_rl.config.roles import ROLLOUT
from megatron_rl.errors import ConfigError, shown
from megatron_rl.planning.layout_search.exact_ranking import Candidate, Finalists
from megatron_rl.planning.layout_search.request import MOST_GPUS, REFUSED, MapRequest, cluster_of, contradictions
from megatron_rl.planning.layout_search.role_on_layout import RoleOnLayout
from megatron_rl.planning.layout_search.search import Search
from megatron_rl.planning.layout_search.search_problem import ClusterSize, SearchProblem, engine_memory

SHOWN = 10


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    candidates: best first. lower_bound: seconds of FLOPs and bytes alone on all ranks, for any placement. num_layouts,
    num_placements: that were compared. num_skipped: allocations that a lower bound excluded.
    """

    request: MapRequest
    candidates: Sequence[Candidate]
    search_seconds: float
    lower_bound: float
    num_layouts: int
    num_placements: int
    num_skipped: int

    @property
    def gap(self) -> float:
        """Relative distance of the best placement from the lower bound."""
        return self.candidates[0].seconds / self.lower_bound - 1


def find_placements(request: MapRequest, number: int = SHOWN) -> SearchResult:
    """Search placements, then count the best exactly. Raises ConfigError if nothing fits or kept values break a
    rule.
    """
    start = time.perf_counter()
    work = request.work
    search = Search(work)
    finalists = Finalists(work, search.names)
    candidates = finalists.best(search.run(), number)
    if not candidates:
        raise_problems(REFUSED, contradictions(request))
        raise ConfigError(nothing_fits(request))
    return SearchResult(
        request,
        candidates,
        time.perf_counter() - start,
        search.lower_bound,
        search.pools.num_layouts,
        search.num_placements,
        search.num_skipped,
    )


def nothing_fits(request: MapRequest) -> str:
    """Return a message with the missing bytes and the smallest cluster that suffices."""
    work, kept = request.work, request.keeps.values
    gpus = request.cluster.num_ranks
    search = Search(work)
    where = f"on {gpus} {request.hardware.name}"
    if kept:
        where += f" with {' '.join(f'{key}={shown(value)}' for key, value in kept.items())}"
    lines = [f"no placement fits {where}"]
    partition = min(search.partitions, key=len, default=None)
    if partition is None:
        return "; ".join([*lines, "no placement of the roles has these pools: leave one of the kept values out"])
    needs = [least_bytes(search, block, request.cluster.num_units) for block in partition]
    if math.inf in needs:
        lines.append("no layout that passes every check splits the models over these ranks")
    else:
        most = max(needs)
        missing = max(0.0, most - work.usable)
        lines.append(
            f"the smallest layout needs {most / 1e9:.2f} GB on the worst rank and has {work.usable / 1e9:.2f} GB: "
            f"{missing:.0f} bytes are missing on a rank, {missing * gpus:.0f} in all"
        )
    enough = smallest_cluster(request)
    if enough is None:
        lines.append(f"no cluster of up to {MOST_GPUS} would do")
    else:
        lines.append(f"the smallest cluster that would do: --gpus {enough.num_ranks}")
    return "; ".join(lines)


def least_bytes(search: Search, block: tuple[str, ...], units: int) -> float:
    """Return the bytes of the worst rank of the smallest layout; infinity where no layout passes the rules."""
    shape, least = search.work.cluster.shape(units), math.inf
    names = tuple(name for name in block if name in search.work.roles)
    for grid in search.pools.grids(names, shape) if names else []:
        roles = [search.pools.on_grid(name, grid, shape, block) for name in names]
        total = [sum(held.total for held in stage) for stage in zip(*(role.held for role in roles), strict=True)]
        passes = [size for role in roles for size in least_of_passes(role)]
        generating = least_cache(search.work) if ROLLOUT in block else 0
        least = min(least, max(total) + max(max(passes), generating))
    return least if names else float(least_cache(search.work))


def least_of_passes(role: RoleOnLayout) -> list[float]:
    """Return the bytes of each pass with its smallest option, on the worst stage; infinity where none is allowed."""
    sizes_of_passes = ((float(max(role.bytes_of(option))) for option in role.options[kind]) for kind in role.kinds)
    return [min(sizes, default=math.inf) for sizes in sizes_of_passes]


def least_cache(work: SearchProblem) -> int:
    """Return the bytes that the engine needs for one sequence, at the largest TP inside of a node."""
    tp = work.cluster.per_node
    return engine_memory(work, tp) + work.cache(tp).needed_bytes(work.longest)


def smallest_cluster(request: MapRequest) -> ClusterSize | None:
    """Double the GPUs until something fits, then bisect the number of machines; None: nothing fits up to MOST_GPUS."""
    unfit, gpus = 0, 1
    while not _fits(request, gpus):
        unfit, gpus = gpus, 2 * gpus
        if gpus > MOST_GPUS:
            return None
    node = cluster_of(request.config, gpus, request.per_node, request.keeps).per_node
    low, high = unfit // node, gpus // node
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(request, middle * node) else (middle, high)
    return ClusterSize(high, node)


def _fits(request: MapRequest, gpus: int) -> bool:
    try:
        cluster = cluster_of(request.config, gpus, request.per_node, request.keeps)
    except ConfigError:  # fewer GPUs than one machine or a kept pool has
        return False
    return something_fits(replace(request, cluster=cluster))


def something_fits(request: MapRequest) -> bool:
    """Return whether a placement in one pool fits, or, on up to 16 machines, any placement."""
    search = Search(request.work)
    for partition in sorted(search.partitions, key=len):
        if len(partition) == 1:
            (block,) = partition
            if any(search.pools.front(block, units) for units in reversed(search.names.sizes(block))):
                return True
    placed = search.run() if request.cluster.num_nodes <= 16 else []
    return bool(placed)
