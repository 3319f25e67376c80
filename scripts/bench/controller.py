"""What a call from the controller costs: nothing to do, and a batch of 40 MiB out and one column back.

    python scripts/bench/controller.py [--ranks 2 4 16 64] [--rounds 200] [--json FILE]

No-op: a method of hosts that each launcher has started beside a bare Ray call of an actor that does nothing, on as many
ranks. Round trip: a batch split over as many data-parallel ranks as there are ranks, beside bare Ray calls that get
the whole batch as one stored object. The arms take turns within one run; figures are medians, with the quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import ray
import torch

from megatron_rl.cluster.loading import import_path
from megatron_rl.cluster.local_launcher import LocalLauncher
from megatron_rl.cluster.pool import ProcessPool
from megatron_rl.cluster.pool_options import PoolOptions
from megatron_rl.cluster.ray_launcher import RayLauncher
from megatron_rl.config.roles import PoolSize
from megatron_rl.dispatch import Coordinates, Dispatch, remote_method
from megatron_rl.records import Batch

MIB = 1 << 20
ROWS, BATCH_MIB = 512, 40
MOST_ROUND_TRIP_RANKS = 4
"""More ranks would each import torch, 230 MB a process."""
CALLS_PER_STEP = 20
MIN_ROUNDS = 80
LARGE_WORLD = 1000


def coordinates() -> Coordinates:
    """Every rank is a data-parallel rank of its own."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return Coordinates(rank, rank, size, True, rank, size, True)


class NoOpWorker:
    """Does nothing, in a process without torch."""

    @remote_method(Dispatch.ONE_TO_ALL)
    def coordinates(self) -> Coordinates:
        return coordinates()

    @remote_method(Dispatch.ONE_TO_ALL)
    def noop(self) -> None:
        """Nothing."""


class BatchWorker(NoOpWorker):
    """Answers a batch with its column."""

    @remote_method(Dispatch.DP)
    def column(self, batch: Batch) -> Batch:
        """The scores of this rank's rows, and one touch of every page of the rest."""
        batch["components"][:, ::1024].sum()
        return Batch(scores=batch["scores"] + 1)


class BareActor:
    """The methods of the toy worker without any of this package."""

    def noop(self) -> None:
        """Nothing."""

    def column(self, batch: Batch, rank: int, size: int) -> Batch:
        """The column of one rank's rows."""
        rows = slice(rank * len(batch) // size, (rank + 1) * len(batch) // size)
        batch["components"][rows, ::1024].sum()
        return Batch(scores=batch["scores"][rows] + 1)


def bare_actors(num: int) -> list:
    """Actors beside those of the group, without resources of their own."""
    found_here = {"env_vars": {"PYTHONPATH": import_path()}}
    options = {"num_cpus": 0, "max_concurrency": 1, "runtime_env": found_here}
    actors = [ray.remote(BareActor).options(**options).remote() for _ in range(num)]
    ray.get([actor.noop.remote() for actor in actors])
    return actors


def interleaved(arms: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every call of every arm, the arms taking turns, and turns in going first."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for number in range(rounds + 3):
        for name in names if number % 2 else reversed(names):
            start = time.perf_counter()
            arms[name]()
            if number >= 3:  # the first ones make connections
                seconds[name].append(time.perf_counter() - start)
    return seconds


def measure(num_ranks: int, rounds: int, worker: type, arms_of: Callable) -> dict[str, list[float]]:
    """All arms on `num_ranks` processes each."""
    options, variables = PoolOptions(env={"OMP_NUM_THREADS": "1"}), {"OMP_NUM_THREADS": "1"}
    size, modules = PoolSize(1, num_ranks), (Path(__file__).stem,)
    with (
        RayLauncher(num_ranks, "cpu", modules, variables) as through_ray,
        LocalLauncher("cpu", modules, variables) as here,
        through_ray.reserve(size) as ranks,
        here.reserve(size) as ranks_here,
        ProcessPool("bench", ranks, worker, options=options) as pool,
        ProcessPool("bench", ranks_here, worker, options=options) as pool_here,
    ):
        groups = {"ray": pool.host(worker), "local": pool_here.host(worker)}
        return interleaved(arms_of(groups, bare_actors(num_ranks)), rounds)


def noop_arms(groups: Mapping[str, NoOpWorker], actors: list) -> dict[str, Callable[[], object]]:
    """A call of every rank that does nothing."""
    arms = {name: lambda group=group: group.noop().get() for name, group in groups.items()}
    return arms | {"bare": lambda: ray.get([actor.noop.remote() for actor in actors])}


def round_trip_arms(groups: Mapping[str, BatchWorker], actors: list) -> dict[str, Callable[[], object]]:
    """40 MiB to the ranks and a column back."""
    torch.manual_seed(0)
    width = BATCH_MIB * MIB // (4 * ROWS)
    batch = Batch(components=torch.rand(ROWS, width), scores=torch.arange(ROWS, dtype=torch.float32))

    arms = {name: lambda group=group: group.column(batch).get()["scores"] for name, group in groups.items()}

    def whole() -> torch.Tensor:
        stored = ray.put(batch)
        parts = ray.get([actor.column.remote(stored, rank, len(actors)) for rank, actor in enumerate(actors)])
        return Batch.joined(parts)["scores"]

    assert all(torch.equal(arm(), whole()) for arm in arms.values()), "the arms must do the same"
    return arms | {"bare": whole}


def row(seconds: list[float], scale: float) -> str:
    low, middle, high = (quartile * scale for quartile in statistics.quantiles(seconds, n=4))
    return f"{middle:9.2f} ({low:.2f} to {high:.2f})"


def report(ranks: int, seconds: Mapping[str, list[float]], scale: float) -> dict[str, float]:
    """Print the arms of one world; return arm -> its median."""
    print(f"{ranks:3} ranks", "".join(f"  {arm} {row(times, scale)}" for arm, times in seconds.items()))
    return {arm: statistics.median(times) * scale for arm, times in seconds.items()}


def slope(medians: Mapping[int, float]) -> tuple[float, float]:
    """(seconds per rank, seconds at no rank) of the straight line through the medians."""
    per_rank, fixed = np.polyfit(list(medians), list(medians.values()), 1)
    return float(per_rank), float(fixed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=200, help="no-op calls on 2 ranks; fewer on more ranks")
    parser.add_argument("--json", type=Path, help="write the medians there")
    options = parser.parse_args()
    found: dict[str, dict] = {"noop": {}, "roundtrip": {}}
    medians: dict[int, float] = {}
    print("no-op, us: median (quartiles)")
    for ranks in options.ranks:
        seconds = measure(ranks, max(MIN_ROUNDS, options.rounds * 2 // ranks), NoOpWorker, noop_arms)
        found["noop"][str(ranks)] = report(ranks, seconds, 1e6)
        medians[ranks] = found["noop"][str(ranks)]["ray"] / 1e6
    print(f"round trip of {BATCH_MIB} MiB, ms: median (quartiles)")
    for ranks in [ranks for ranks in options.ranks if ranks <= MOST_ROUND_TRIP_RANKS]:
        seconds = measure(ranks, max(10, options.rounds // 10), BatchWorker, round_trip_arms)
        found["roundtrip"][str(ranks)] = report(ranks, seconds, 1e3)
    if len(medians) > 1:
        per_rank, fixed = slope(medians)
        cost = CALLS_PER_STEP * (per_rank * LARGE_WORLD + fixed)
        found["at_1000_ranks_s"] = cost
        print(f"{per_rank * 1e6:.0f} us per rank: {CALLS_PER_STEP} calls at {LARGE_WORLD} ranks cost {cost:.1f} s")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
