"""Measure the cost of many ranks for their driver.

Small ranks run under the real pool, local launcher, supervisor, heartbeats and repairs.

    python scripts/bench/scale.py [--ranks 64 128 256] [--json FILE]

For each number of ranks: seconds to start, CPU seconds and bytes of a call that does nothing and of one that cuts rows
over all ranks, the longest silence of a living rank, seconds to notice that one has died, to repair the run, and to
end. Each is a median of several calls. The exponent of a curve is the slope of the logarithms. Seconds of CPU are the
driver's own, so that they hold on a machine that others use; a rank is a fork of some 7 MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import torch
from scale_worker import SmallHost

from megatron_rl.cluster import rank_messages
from megatron_rl.cluster.launcher import Ranks
from megatron_rl.cluster.local_launcher import LocalLauncher
from megatron_rl.cluster.pool import ProcessPool
from megatron_rl.cluster.pool_options import PoolOptions
from megatron_rl.cluster.supervisor_client import LocalRankProcess
from megatron_rl.config.load import load_config
from megatron_rl.config.roles import PoolSize
from megatron_rl.controller.repairs import REPAIRS_FILE, Repairs, with_repairs
from megatron_rl.errors import WorkerFailure
from megatron_rl.records import Batch

DEMO = Path(__file__).parents[2] / "configs/demo_cpu.yaml"
MIB = 1 << 20
ROWS_PER_RANK = 8
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
COUNTED = ("start_cpu_s", "noop_cpu_s", "noop_bytes", "rows_cpu_s", "rows_bytes", "driver_mib", "ranks_mib")
"""Figures with an exponent: CPU seconds, bytes and memory; those of the clock depend on what else the machine does."""


class Moved:
    """Counts the bytes of messages to ranks of this machine, and of their replies."""

    def __init__(self) -> None:
        self.num_bytes = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count while the block runs."""
        send, read = LocalRankProcess.send, rank_messages._Unpickler

        def sent(process: LocalRankProcess, message: bytes) -> Future[Any]:
            self.num_bytes += len(message)
            return send(process, message)

        def arrived(reply: bytes, *rest: Any) -> Any:
            self.num_bytes += len(reply)
            return read(reply, *rest)

        with patch.object(LocalRankProcess, "send", sent), patch.object(rank_messages, "_Unpickler", arrived):
            yield


def measured(call: Callable[[], object], rounds: int) -> dict[str, float]:
    """Return medians of a call: seconds, CPU seconds of this process, bytes of messages; and the spread of CPU."""
    rows, moved = [], Moved()
    for _ in range(rounds):
        before = np.array([time.perf_counter(), time.process_time()])
        call()
        rows.append(np.array([time.perf_counter(), time.process_time()]) - before)
    with moved.counted():
        call()
    wall, cpu = zip(*rows, strict=True)
    low, middle, high = statistics.quantiles(map(float, cpu), n=4)
    medians = {"s": float(np.median(wall)), "bytes": float(moved.num_bytes)}
    return medians | {"cpu_s": middle, "low": low, "high": high}


def memory_mib(processes: Sequence[psutil.Process]) -> float:
    """Return the memory of processes, pages that several share divided between them."""
    return sum(process.memory_full_info().pss for process in processes) / MIB


def cpu_of_start(pids: Sequence[int]) -> dict[str, float]:
    """Return the CPU seconds of all ranks and of the supervisor that has started them, since they began."""
    times = [psutil.Process(pid).cpu_times() for pid in (*pids, psutil.Process(pids[0]).ppid())]
    *ranks, supervisor = [spent.user + spent.system for spent in times]
    return {"ranks_cpu_s": sum(ranks), "supervisor_cpu_s": supervisor}


def rank_pool(ranks: Ranks) -> ProcessPool:
    return ProcessPool("scale", ranks, SmallHost, options=PoolOptions(env=ENVIRONMENT))


def longest_silence(pool: ProcessPool, seconds: float) -> float:
    """Return how long the driver has not heard of one of the living ranks, at most."""
    longest, until = 0.0, time.monotonic() + seconds
    assert pool.monitor is not None
    while time.monotonic() < until:
        time.sleep(0.1)
        now = time.monotonic()
        longest = max(longest, *(now - sign.heard_at for sign in pool.monitor.signs.values()))
    pool.raise_if_failed()
    return longest


class ManyRanks:
    """A run of small ranks under the controller's repairs: its first attempt is measured and loses a rank.

    row: the figures. folder: of the run.
    """

    def __init__(self, num_ranks: int, rounds: int, listen_s: float, folder: Path) -> None:
        self.row: dict[str, float] = {"ranks": num_ranks}
        self._num_ranks, self._rounds, self._listen_s, self._folder = num_ranks, rounds, listen_s, folder
        self._begun, self._earlier = 0.0, set(psutil.Process().children(recursive=True))

    def attempt(self, repairs: Repairs) -> None:
        """Start the ranks and call them; the first time until one has died."""
        with (
            repairs.launcher(lambda: LocalLauncher("cpu", (SmallHost.__module__,), ENVIRONMENT)) as launcher,
            launcher.reserve(PoolSize(1, self._num_ranks), ()) as ranks,
        ):
            start, cpu = time.perf_counter(), time.process_time()
            with rank_pool(ranks) as pool:
                seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
                repairs.begun(0, "start", self._folder)
                if not repairs.attempt:
                    self.row |= {"start_s": seconds, "start_cpu_s": cpu_s} | cpu_of_start(pool.pids)
                    self._measure(pool)
                    self._lose_one(pool, self._num_ranks // 2)
                pool.host(SmallHost).noop().get()
                self.row["repair_s"] = repairs.all[0].seconds
                self._begun = time.perf_counter()

    def note_end(self) -> None:
        """Note how long the end took, after which nothing may be left."""
        self.row["end_s"] = time.perf_counter() - self._begun
        if left := set(psutil.Process().children(recursive=True)) - self._earlier:
            raise RuntimeError(f"{len(left)} processes are left: {', '.join(map(str, left))}")

    def _measure(self, pool: ProcessPool) -> None:
        row, host = self.row, pool.host(SmallHost)
        rows = torch.arange(self._num_ranks * ROWS_PER_RANK, dtype=torch.float32)
        batch = Batch(scores=rows)
        for name, call in (("noop", lambda: host.noop().get()), ("rows", lambda: host.scores(batch).get())):
            call()
            row |= {f"{name}_{unit}": value for unit, value in measured(call, self._rounds).items()}
        assert torch.equal(host.scores(batch).get()["scores"], rows + 1)
        row["threads"] = threading.active_count()
        row["silence_s"] = longest_silence(pool, self._listen_s)
        row["driver_mib"] = psutil.Process().memory_info().rss / MIB
        row["ranks_mib"] = memory_mib([psutil.Process(pid) for pid in pool.pids])

    def _lose_one(self, pool: ProcessPool, rank: int) -> None:
        """Kill a rank and wait for a call, until the driver reports this rank."""
        start = time.perf_counter()
        os.kill(pool.pids[rank], signal.SIGKILL)
        try:
            while time.perf_counter() - start < 120:
                pool.host(SmallHost).noop().get()
        except WorkerFailure as error:
            self.row["notice_s"] = time.perf_counter() - start
            assert f"rank {rank} " in str(error), error
            raise
        raise RuntimeError(f"rank {rank} is dead, and the driver has not noticed")


def one_size(num_ranks: int, rounds: int, listen_s: float = 10.0) -> dict[str, float]:
    """Start the ranks, call them, hear them for a while, lose one, repair the run, and end it."""
    config = load_config(DEMO, [f"trainer.n_gpus_per_node={num_ranks}", "trainer.max_repairs=1"])
    with tempfile.TemporaryDirectory() as folder:
        run = ManyRanks(num_ranks, rounds, listen_s, Path(folder))
        with_repairs(config, False, run.attempt)
        run.note_end()
        assert len((Path(folder) / REPAIRS_FILE).read_text().splitlines()) == 1
    return run.row


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope of the straight line through the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def exponents(rows: Sequence[Mapping[str, float]], names: Sequence[str], over: str = "ranks") -> dict[str, float]:
    """Return the exponents of curves. over: the name of the size."""
    sizes = [row[over] for row in rows]
    return {name: exponent(sizes, [row[name] for row in rows]) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    rows = []
    for num_ranks in options.ranks:
        rows.append(one_size(num_ranks, options.rounds))
        print("  ".join(f"{name} {value:.5g}" for name, value in rows[-1].items()), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    if len(rows) > 1:
        print("exponents: ", "  ".join(f"{name} {value:.2f}" for name, value in exponents(rows, COUNTED).items()))


if __name__ == "__main__":
    main()
