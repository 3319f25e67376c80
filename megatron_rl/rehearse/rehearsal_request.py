"""Which ranks of which run are rehearsed, as plain data that one process hands to another. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rl.config.roles import Placement
from megatron_rl.errors import ConfigError

ALL = "all"
NUMBER = re.compile(r"\s*[0-9]{1,9}\s*")


@dataclass(frozen=True)
class RankOfPool:
    """A rank: number counts over all pools, the actor's first; rank, within its pool, which is a world of its own."""

    number: int
    pool: str
    rank: int


@dataclass(frozen=True)
class RehearsalRequest:
    """What the rehearsing process is asked for.

    config, overrides: of the run, with device cuda. task: of `trainer.stage`. ranks: in the order of rehearsal. jobs:
    processes at the same time. out: folder of the ranks' files. library: the fake device, once it is built.
    """

    config: str
    overrides: tuple[str, ...]
    task: str
    ranks: tuple[RankOfPool, ...]
    jobs: int
    out: str
    library: str = ""

    def write(self, file: Path) -> None:
        """Write it as JSON."""
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> RehearsalRequest:
        """Read what `write` wrote."""
        data = json.loads(file.read_text())
        ranks = tuple(RankOfPool(**rank) for rank in data["ranks"])
        return cls(**data | {"ranks": ranks, "overrides": tuple(data["overrides"])})


def rank_file(out: Path, number: int) -> Path:
    """Return the file of one rank."""
    return out / f"rank{number}.json"


def all_ranks(placement: Placement) -> list[RankOfPool]:
    """Return every rank of a run, pool by pool."""
    places = [(name, rank) for name, pool in placement.pools.items() for rank in range(pool.world_size)]
    return [RankOfPool(number, name, rank) for number, (name, rank) in enumerate(places)]


def chosen_ranks(text: str | None, placement: Placement) -> tuple[RankOfPool, ...]:
    """Return the ranks that `--ranks` names: "all", or numbers with commas; None: one of each pipeline stage.

    Raises ConfigError for anything else.
    """
    ranks = all_ranks(placement)
    if text is None:
        return tuple(_one_of_each_stage(ranks, placement))
    if text == ALL:
        return tuple(ranks)
    if not all(NUMBER.fullmatch(part) for part in text.split(",")):
        rule = f"must be {ALL}, or numbers with commas"
        raise ConfigError(f"--ranks {text:.200} {rule}; try: --ranks 0,{len(ranks) - 1}")
    numbers = list(dict.fromkeys(int(part) for part in text.split(",")))
    if max(numbers) >= len(ranks):
        nearest = ",".join(str(number) for number in dict.fromkeys(min(number, len(ranks) - 1) for number in numbers))
        raise ConfigError(
            f"--ranks {text:.200} must be below {len(ranks)}, the ranks of all pools; try: --ranks {nearest}"
        )
    return tuple(ranks[number] for number in numbers)


def _one_of_each_stage(ranks: Sequence[RankOfPool], placement: Placement) -> list[RankOfPool]:
    """Return the first rank of each pipeline stage of each pool."""
    chosen = []
    for pool in placement.pools.values():
        in_pool = [rank for rank in ranks if rank.pool == pool.name]
        per_stage = len(in_pool) // pool.layout.pipeline_model_parallel_size
        chosen += in_pool[::per_stage]
    return chosen
