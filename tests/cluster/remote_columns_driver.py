"""A driver whose ranks on two nodes hold columns for ranks on both; its reader ends one node once it has read a line.

Prints as JSON what became of the columns while both nodes are there; then, after the loss, what readers say of them.
"""

import json
import sys

import torch
from remote_columns_worker import Maker, Reader, expected_sums, num_held_files, numbers, pool, rows
from resident import peak_growth

from megatron_rl.cluster.ray_launcher import RayLauncher
from megatron_rl.config.roles import PoolSize
from megatron_rl.errors import WorkerFailure
from megatron_rl.records import Batch

SIZE = PoolSize(2, 1)


def main() -> None:
    with (
        RayLauncher(4, "cpu") as launcher,
        launcher.reserve(SIZE) as of_makers,
        launcher.reserve(SIZE) as of_readers,
        pool("makers", of_makers, Maker) as makers,
        pool("readers", of_readers, Reader) as readers,
    ):
        batch, order = rows(64, 512), torch.randperm(64, generator=torch.Generator().manual_seed(0))
        maker, reader = makers.host(Maker), readers.host(Reader)

        def step() -> list[float]:
            taken = Batch(input_ids=batch["input_ids"], sampled=batch["sampled"])
            taken.add(maker.make(batch).get()[1])
            halves = [reader.sums(taken[order][rows]).get() for rows in (slice(0, 24), slice(24, 64))]
            seen.append(num_held_files(launcher))
            return Batch.joined(halves)[order.argsort()].flat("advantages").tolist()

        seen: list[int] = []
        sums: list[list[float]] = []
        step()
        growth = peak_growth(lambda: sums.append(step()))
        while num_held_files(launcher):
            reader.coordinates().get()
        made = maker.make(batch).get()[1]
        last = made[torch.tensor([63, 0])]
        report = {
            "nodes": len({process.node_id for process in makers.processes.infos}),
            "exact": sums == [expected_sums(batch)],
            "read": torch.equal(
                last.flat("teacher_hidden"), numbers(batch[torch.tensor([63, 0])].sampled_ids.values())
            ),
            "growth": growth,
            "files": seen,
        }
        print(json.dumps(report), flush=True)
        sys.stdin.readline()
        print(json.dumps({"lost": [what_it_raises(made, row) for row in (0, 63)]}), flush=True)


def what_it_raises(made: Batch, row: int) -> str:
    try:
        made[torch.tensor([row])].flat("teacher_hidden")
    except WorkerFailure as error:
        assert error.is_loss
        return str(error)
    return ""


if __name__ == "__main__":
    try:
        main()
    except WorkerFailure as failure:  # of the ranks on the node that is gone, when the pools are left
        print(failure)
