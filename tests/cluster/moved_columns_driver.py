"""A driver whose replica on one node makes columns for ranks on the other, and ends; prints as JSON what is left."""

import json

from remote_columns_worker import Maker, Reader, expected_sums, num_held_files, pool, rows
from resident import peak_growth

from megatron_rl.cluster.pool import ProcessPool
from megatron_rl.cluster.ranks import ReplicaRanks
from megatron_rl.cluster.ray_launcher import RayLauncher
from megatron_rl.config.roles import PoolSize
from megatron_rl.records import Batch
from megatron_rl.remote_columns import RemoteColumn

SIZE = PoolSize(1, 2)
"""All of a node."""


def main() -> None:
    with (
        RayLauncher(4, "cpu") as launcher,
        launcher.reserve(SIZE) as of_readers,
        pool("readers", of_readers, Reader) as readers,
    ):
        batch, taken = rows(64, 512), []

        def answer() -> None:
            made = makers.host(Maker).make(batch).get()[1]
            taken.append(Batch(input_ids=batch["input_ids"], sampled=batch["sampled"]))
            taken[0].add(made)

        with (
            launcher.reserve(SIZE) as of_makers,
            ProcessPool("makers", ReplicaRanks("replica", of_makers, 0, 2), Maker) as makers,
        ):
            nodes = [{process.node_id for process in each.processes.infos} for each in (readers, makers)]
            growth = peak_growth(answer)
        column = taken[0].stored("teacher_hidden")
        assert isinstance(column, RemoteColumn)
        reader = readers.host(Reader)
        sums = reader.sums(taken[0]).get().flat("advantages").tolist()
        report = {
            "apart": nodes[0].isdisjoint(nodes[1]),
            "moved": {part.node for part in column.parts} == nodes[0],
            "exact": sums == expected_sums(batch),
            "growth": growth,
        }
        del column, taken[:]
        while num_held_files(launcher):
            reader.coordinates().get()
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
