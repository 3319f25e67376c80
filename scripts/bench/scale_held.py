"""Measure what columns that many ranks hold cost the driver, which has their names alone.

    python scripts/bench/scale_held.py [--ranks 32 128 512] [--rounds 9]

Each rank holds a column of its own rows; the rows are dealt out anew, so that a rank reads those of many others.
Printed: CPU seconds of the driver to choose rows and send them, and bytes of the messages, with exponents.
"""

from __future__ import annotations

import argparse

import torch
from scale import ENVIRONMENT, exponents, measured
from scale_worker import WIDTH, HoldingHost

from megatron_rl.cluster.local_launcher import LocalLauncher
from megatron_rl.cluster.pool import ProcessPool
from megatron_rl.cluster.pool_options import PoolOptions
from megatron_rl.cluster.shm_files import HELD_BYTES
from megatron_rl.config.roles import PoolSize
from megatron_rl.records import Batch, ragged_from_lengths, single_turn
from megatron_rl.remote_columns import RemoteColumn

ROWS_PER_RANK, TOKENS = 4, 3
COUNTED = ("make_cpu_s", "make_bytes", "read_cpu_s", "read_bytes")


def rows(num_rows: int) -> Batch:
    """Return rows of one token and TOKENS that were sampled, no two tokens alike."""
    lengths = torch.full((num_rows,), 1 + TOKENS)
    return single_turn(ragged_from_lengths(torch.arange(int(lengths.sum())), lengths), lengths - 1)


def dealt(batch: Batch, seed: int = 0) -> Batch:
    """Return the rows in another order."""
    return batch[torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))]


def one_size(num_ranks: int, rounds: int) -> dict[str, float]:
    """Have ranks make a column that stays with them, and read it in other shares."""
    row: dict[str, float] = {"ranks": num_ranks}
    batch = rows(num_ranks * ROWS_PER_RANK)
    variables = ENVIRONMENT | {HELD_BYTES: "1"}
    with (
        LocalLauncher("cpu", (HoldingHost.__module__,), variables) as launcher,
        launcher.reserve(PoolSize(1, num_ranks)) as ranks,
        ProcessPool("held", ranks, HoldingHost, options=PoolOptions(env=variables)) as pool,
    ):
        host = pool.host(HoldingHost)
        for name, value in measured(lambda: host.wide(batch).get(), rounds).items():
            row[f"make_{name}"] = value
        batch.add(host.wide(batch).get())
        assert isinstance(batch.stored("teacher_hidden"), RemoteColumn)
        other = dealt(batch)
        sums = host.sums(other).get()["advantages"].values()
        assert torch.equal(sums, WIDTH * other.sampled_ids.values().float())
        for name, value in measured(lambda: host.sums(dealt(batch)).get(), rounds).items():
            row[f"read_{name}"] = value
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    found = []
    for num_ranks in options.ranks:
        found.append(one_size(num_ranks, options.rounds))
        print("  ".join(f"{name} {value:.5g}" for name, value in found[-1].items()), flush=True)
    if len(found) > 1:
        print("exponents: ", "  ".join(f"{name} {value:.2f}" for name, value in exponents(found, COUNTED).items()))


if __name__ == "__main__":
    main()
