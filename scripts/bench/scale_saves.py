"""Measure what many ranks ask of a store where they meet and of the folder of a checkpoint.

    python scripts/bench/scale_saves.py [--ranks 4 16 64 256] [--late 2] [--json FILE]

For each number of ranks: seconds from the arrival of a straggler at the store until the last rank has left, and the CPU
seconds that the others spent in the wait; then what a rank that saves asks of the checkpoint's folder, at most, and
rank 0. Counts hold on any machine. Larger sizes only meet. Ranks are forks with torch and Megatron.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from scale import ENVIRONMENT, exponents
from scale_saver import SavingHost

from megatron_rl.cluster.local_launcher import LocalLauncher
from megatron_rl.cluster.pool import ProcessPool
from megatron_rl.cluster.pool_options import PoolOptions
from megatron_rl.config.roles import PoolSize

MOST_SAVERS = 32
"""More do not save here: gloo connects each rank with each other, which takes 64 ranks minutes on two cores."""


def meeting(host: SavingHost, file: Path, late_s: float) -> dict[str, float]:
    """Return what a meeting costs to which rank 0 comes late."""
    file.touch()
    came, left, cpu = zip(*host.meet_late(str(file), late_s).get(), strict=True)
    return {"meet_s": max(left) - came[0], "waiting_cpu_s": sum(cpu[1:]) / len(cpu[1:])}


def saving(host: SavingHost, folder: Path) -> dict[str, float]:
    """Return what ranks ask of a checkpoint's folder: rank 0, and of the others the one that asks most."""
    folder.mkdir()
    first, *others = map(Counter, host.save(folder).get())
    names = sorted(first | sum(others, Counter()))
    counts = {f"rank_0_{name}": float(first[name]) for name in names}
    return counts | {f"most_{name}": float(max(each[name] for each in others)) for name in names}


def one_size(num_ranks: int, late_s: float) -> dict[str, float]:
    """Start the ranks; have them meet and save."""
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalLauncher("cpu", (SavingHost.__module__,), ENVIRONMENT) as launcher,
        launcher.reserve(PoolSize(1, num_ranks)) as ranks,
        ProcessPool("saves", ranks, SavingHost, options=PoolOptions(env=ENVIRONMENT)) as pool,
    ):
        host = pool.host(SavingHost)
        row = {"ranks": num_ranks} | meeting(host, Path(folder) / "store", late_s)
        if num_ranks > MOST_SAVERS:
            return row
        host.join().get()
        return row | saving(host, Path(folder) / "saved")


def per_rank(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the exponents of what one rank asks, over the number of ranks."""
    saved = [row for row in rows if row["ranks"] <= MOST_SAVERS]
    names = [name for name in saved[0] if name.startswith("most_") and all(row[name] for row in saved)]
    return exponents(rows, ["meet_s", "waiting_cpu_s"]) | (exponents(saved, names) if len(saved) > 1 else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 64, 256])
    parser.add_argument("--late", type=float, default=2.0, help="seconds")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    rows = []
    for num_ranks in options.ranks:
        rows.append(one_size(num_ranks, options.late))
        print("  ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    if len(rows) > 1:
        print("exponents a rank: ", "  ".join(f"{name} {value:.2f}" for name, value in per_rank(rows).items()))


if __name__ == "__main__":
    main()
