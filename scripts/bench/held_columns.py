"""A batch of hidden states from ranks to ranks: through the driver, and held where it was made.

    python scripts/bench/held_columns.py [--mib 500] [--ranks 2] [--rounds 5] [--launchers local ray] [--sweep]

One pool makes a column and another reads it in another order of rows, as teachers and the actor do. Both arms have
their pools side by side and take turns. Seconds, CPU seconds of all processes of the run, and the most by which the
driver's resident set grows: medians, with the least and the most. --sweep: the same for small columns, to choose from
which size on to hold them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import torch
from resident import give_back, peak_growth

from megatron_rl.cluster.local_launcher import LocalLauncher
from megatron_rl.cluster.pool import ProcessPool
from megatron_rl.cluster.pool_options import PoolOptions
from megatron_rl.cluster.ray_launcher import RayLauncher
from megatron_rl.cluster.shm_files import HELD_BYTES
from megatron_rl.cluster.stale_processes import processes_with
from megatron_rl.config.roles import PoolSize
from megatron_rl.dispatch import Coordinates, Dispatch, remote_method
from megatron_rl.records import Batch, ragged_from_lengths, single_turn

MIB = 1 << 20
WIDTH, ROWS, SWEPT_TOKENS = 2048, 256, 4096
ARMS = {"through the driver": "inf", "held": "1"}
SWEPT_KIB = (16, 64, 256, 1024, 4096, 16384)


class Host:
    """A data-parallel rank of its own."""

    def __init__(self) -> None:
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    @remote_method(Dispatch.ONE_TO_ALL)
    def coordinates(self) -> Coordinates:
        return Coordinates(self._rank, self._rank, self._size, True, self._rank, self._size, True)

    @remote_method(Dispatch.DP)
    def make(self, batch: Batch, width: int) -> Batch:
        """A made-up hidden state of every sampled token, in bfloat16."""
        tokens = batch.sampled_ids.values()
        hidden = tokens[:, None].to(torch.bfloat16).expand(-1, width).contiguous()
        return Batch(teacher_hidden=batch.per_sampled_token(hidden))

    @remote_method(Dispatch.DP)
    def read(self, batch: Batch) -> Batch:
        """The first number of every token, and one touch of every page of the rest."""
        hidden = batch["teacher_hidden"].values()
        hidden.reshape(-1)[::2048].sum()
        return Batch(advantages=batch.per_sampled_token(hidden[:, 0].float()))


def rows(num_tokens: int) -> Batch:
    """Rows with so many sampled tokens together."""
    lengths = torch.full((ROWS,), num_tokens // ROWS + 1)
    return single_turn(ragged_from_lengths(torch.arange(int(lengths.sum())) % 128, lengths), lengths - 1)


class Arm:
    """One way: a pool that makes and one that reads."""

    def __init__(self, opened: ExitStack, launcher: LocalLauncher | RayLauncher, num_ranks: int, held: str) -> None:
        options, size = PoolOptions(env={"OMP_NUM_THREADS": "1", HELD_BYTES: held}), PoolSize(1, num_ranks)
        places = [opened.enter_context(launcher.reserve(size)) for _ in range(2)]
        pools = [opened.enter_context(ProcessPool(name, ranks, Host, options=options)) for name, ranks in
                 zip(("makers", "readers"), places, strict=True)]  # fmt: skip
        self._makers, self._readers = (pool.host(Host) for pool in pools)
        self._run_id = launcher.scratch.run_id

    def step(self, batch: Batch, order: torch.Tensor, width: int) -> Batch:
        """Make, bring into order, and read."""
        taken = Batch(input_ids=batch["input_ids"], sampled=batch["sampled"])
        taken.add(self._makers.make(batch, width).get())
        return self._readers.read(taken[order]).get()

    def measured(self, batch: Batch, order: torch.Tensor, width: int) -> tuple[float, float, float]:
        """(seconds, CPU seconds, MiB of the driver) of a step, whose numbers are checked."""
        answers: list[Batch] = []
        seconds = 0.0

        def timed() -> None:
            nonlocal seconds
            start = time.perf_counter()
            answers.append(self.step(batch, order, width))
            seconds = time.perf_counter() - start

        if num_bytes(batch, width) > 64 * MIB:  # what is freed is not measured again; small steps would wait for it
            give_back()
        cpu = self._cpu_seconds()
        growth = peak_growth(timed)
        cpu = self._cpu_seconds() - cpu
        assert torch.equal(answers[0].flat("advantages"), batch[order].sampled_ids.values().float())
        return seconds, cpu, growth / MIB

    def _cpu_seconds(self) -> float:
        """Return the CPU seconds of the driver and of every process of the run, Ray's too."""
        total = 0.0
        for process in {psutil.Process(), *processes_with(self._run_id)}:
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            total += times.user + times.system
        return total


def num_bytes(batch: Batch, width: int) -> int:
    """Bytes of the hidden states."""
    return 2 * width * int(batch.num_sampled.sum())


def line(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def compared(arms: dict[str, Arm], batch: Batch, width: int, rounds: int) -> None:
    """Print both arms, which take turns, and turns in going first."""
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name in arms if number % 2 else reversed(arms):
            measured = arms[name].measured(batch, order, width)
            if number:  # the first one makes connections
                figures[name].append(measured)
    for name, rounds_of_arm in figures.items():
        seconds, cpu, growth = zip(*rounds_of_arm, strict=True)
        print(f"  {num_bytes(batch, width) / MIB:8.2f} MiB {name:18}: {line(seconds, 4)} s, CPU {line(cpu, 2)} s, "
              f"driver {line(growth, 1)} MiB", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=2, help="of each of the two pools")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--launchers", nargs="+", choices=("local", "ray"), default=["local", "ray"])
    parser.add_argument("--sweep", action="store_true", help="small columns instead")
    options = parser.parse_args()
    modules, variables = (Path(__file__).stem,), {"OMP_NUM_THREADS": "1"}
    for kind in options.launchers:
        launcher = (
            LocalLauncher("cpu", modules, variables)
            if kind == "local"
            else RayLauncher(4 * options.ranks, "cpu", modules, variables)
        )
        with ExitStack() as opened:
            opened.enter_context(launcher)
            arms = {name: Arm(opened, launcher, options.ranks, held) for name, held in ARMS.items()}
            print(f"{kind}, {options.ranks} ranks -> {options.ranks} ranks")
            if options.sweep:
                for kib in SWEPT_KIB:
                    compared(arms, rows(SWEPT_TOKENS), (kib << 10) // (2 * SWEPT_TOKENS), options.rounds)
            else:
                compared(arms, rows(options.mib * MIB // (2 * WIDTH)), WIDTH, options.rounds)


if __name__ == "__main__":
    main()
