"""Random placements to compare the best one with, and an ablation file of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import yaml

from megatron_rl.checkpoint.storage import writing
from megatron_rl.config.roles import ACTOR, ROLLOUT
from megatron_rl.config.setting import OVERRIDE
from megatron_rl.errors import ConfigError
from megatron_rl.planning.layout_search.exact_ranking import Candidate, Finalists
from megatron_rl.planning.layout_search.partitions import Block
from megatron_rl.planning.layout_search.pools import PoolChoice
from megatron_rl.planning.layout_search.request import MapRequest
from megatron_rl.planning.layout_search.search import Placed, Search

TRIES = 40
"""Draws for each wanted placement: some do not fit, others repeat."""
CHOSEN = "map"


def sampled(request: MapRequest, number: int, seed: int = 0) -> list[Candidate]:
    """Draw up to `number` different placements on all ranks: a partition, sizes and a layout of each pool, uniformly.

    Micro-batches and recomputation are the best of the layout.
    """
    search = Search(request.work)
    finalists, random = Finalists(search.work, search.names), Random(seed)
    candidates: dict[str, Candidate] = {}
    for _ in range(TRIES * number):
        if len(candidates) == number:
            break
        placed = drawn(search, random)
        candidate = None if placed is None else finalists.candidate(placed)
        if candidate is not None:
            candidates.setdefault(str(candidate.settings), candidate)
    return list(candidates.values())


def drawn(search: Search, random: Random) -> Placed | None:
    """Draw one placement; None if the drawn pools have no layout."""
    partition = random.choice(search.partitions)
    sizes = list(allocations(search, partition, search.work.cluster.num_units))
    if not sizes:
        return None
    choices: list[PoolChoice] = []
    for block, units in zip(partition, random.choice(sizes), strict=True):
        layouts = list(search.pools.choices(block, units))
        if not layouts:
            return None
        choices.append(random.choice(layouts))
    choices.sort(key=lambda choice: (ACTOR not in choice.block, ROLLOUT not in choice.block))
    return Placed(tuple(choices), 0.0)


def allocations(search: Search, blocks: Sequence[Block], units: int) -> Iterator[tuple[int, ...]]:
    """Yield sizes of these pools that add up to `units`."""
    first, *others = blocks
    for size in search.names.sizes(first):
        if not others and size == units:
            yield (size,)
        elif others and size < units:
            yield from ((size, *rest) for rest in allocations(search, others, units - size))


def write_points(request: MapRequest, best: Candidate, others: Sequence[Candidate], hardware: str, file: Path) -> None:
    """Write an ablation file with the best placement and others.

    Raises ConfigError where the configuration has pools, which points cannot remove, and StorageError.
    """
    if request.config.pools:
        names = ", ".join(request.config.pools)
        raise ConfigError(f"--points needs a configuration without pools, and {request.path} has {names}")
    kept = {setting.key: setting.value for setting in request.settings if setting.origin == OVERRIDE}
    points: list[dict[str, Any]] = [{"name": CHOSEN, **best.settings}]
    points += [{"name": f"random-{number}", **one.settings} for number, one in enumerate(others, start=1)]
    content = {
        "config": str(request.path),
        "overrides": kept,
        "points": [point for point in points if point is points[0] or not _same(point, points[0])],
        "baseline": CHOSEN,
        "chosen": CHOSEN,
        "hardware": hardware,
        "prompt_length": request.lengths[0],
        "response_length": request.lengths[1],
        "warmup_steps": 2,
        "repeats": 2,
    }
    with writing():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("# For megatron-rl ablate: the candidates of map, and placements chosen at random.\n")
        with file.open("a") as opened:
            yaml.safe_dump(content, opened, sort_keys=False, width=120)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return {**one, "name": None} == {**other, "name": None}
