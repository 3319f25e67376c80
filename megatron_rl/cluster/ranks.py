"""The ranks of one replica of a pool, and the places of ranks among nodes and GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.cluster.launcher import VISIBLE_GPUS, ProcessInfo, RankProcess, Ranks
from megatron_rl.cluster.stale_processes import DRAINS, REPLICA
from megatron_rl.remote_columns import RemoteColumn

LOOPBACK = "127.0.0.1"


class ReplicaRanks(Ranks):
    """Ranks [place * size, (place + 1) * size) of a reservation, as a world of their own.

    number: of the replica, which is its place where the reservation has all `num_replicas` of them. Their environment
    also has POOL_REPLICA (the number), POOL_REPLICAS (how many there are), POOL_FIRST_RANK (the ranks of replicas with
    smaller numbers) and `leftovers.REPLICA` (the replica's name); with `drains` also DRAINS. Raises ValueError where
    the reservation has no such ranks.
    """

    def __init__(
        self,
        name: str,
        whole: Ranks,
        number: int,
        size: int,
        *,
        place: int | None = None,
        num_replicas: int | None = None,
        drains: bool = False,
    ) -> None:
        place = number if place is None else place
        if size < 1 or whole.world_size % size or not 0 <= place < whole.world_size // size:
            raise ValueError(f"{whole.world_size} ranks have no replica {place} of {size} ranks each")
        self._name, self._whole, self._drains = name, whole, drains
        self.number, self._num_replicas = number, num_replicas or whole.world_size // size
        per_node = whole.num_ranks_per_node
        fits = per_node % size == 0 or size % per_node == 0
        super().__init__(size, min(size, per_node) if fits else 1, place * size, per_node)

    def device_index(self, rank: int) -> int:
        """The reservation's index where each process sees its own device only, else the `local_rank`."""
        return min(self._whole.device_index(self.first + rank), self.local_rank(rank))

    def start(self, rank: int, variables: Mapping[str, str]) -> RankProcess:
        return self._whole.start(self.first + rank, variables)

    def share(self, message: bytes, held: Sequence[RemoteColumn] = ()) -> Any:
        return self._whole.share(message, held)

    @property
    def address(self) -> str:
        return self._whole.address

    @property
    def is_lost(self) -> bool:
        return self._whole.is_lost

    @property
    def run_id(self) -> str:
        return self._whole.run_id

    def ask(self) -> None:
        self._whole.ask()

    @property
    def is_given(self) -> bool:
        return self._whole.is_given

    def give_back(self) -> None:
        self._whole.give_back()

    @property
    def variables(self) -> dict[str, str]:
        drains = {DRAINS: "1"} if self._drains else {}
        return self._whole.variables | {
            REPLICA: self._name,
            "POOL_REPLICA": str(self.number),
            "POOL_REPLICAS": str(self._num_replicas),
            "POOL_FIRST_RANK": str(self.number * self.world_size),
            **drains,
        }


def node_addresses(processes: Sequence[ProcessInfo], everybody: Sequence[ProcessInfo] | None = None) -> list[str]:
    """Return the address of each rank's node, in rank order; the loopback address where all ranks are on one node.

    everybody: the processes of all pools, which reach each other; None: there is one pool.
    """
    is_one = len({process.node_id for process in everybody or processes}) == 1
    return [LOOPBACK if is_one else process.host for process in processes]


def gpu_variables(processes: Sequence[ProcessInfo]) -> list[dict[str, str]]:
    """Return variables that show each rank of a world the GPUs of all its ranks on the same node, in rank order.

    processes: of the world, in rank order; Ray shows each process its own GPU. LOCAL_RANK is the index of the rank's
    own GPU. Set the variables before anything asks for CUDA.
    """
    mates = [[mate for mate in processes if mate.node_id == process.node_id] for process in processes]
    return [
        {VISIBLE_GPUS: ",".join(mate.gpus for mate in here), "LOCAL_RANK": str(here.index(process))}
        for process, here in zip(processes, mates, strict=True)
    ]


def place_variables(
    processes: Sequence[ProcessInfo], meeting: Mapping[str, str], everybody: Sequence[ProcessInfo] | None = None
) -> list[dict[str, str]]:
    """Return the variables that tell each rank of a pool its place, in rank order; everybody: as in `node_addresses`.

    NODE_RANK: the number of its node, in the order of the nodes' first ranks. Nodes are Ray's, so ranks on one machine
    have one number. NODE_ID: the node's name, which it keeps when ranks start again. NODE_ADDRESS: its entry of
    `node_addresses`. MASTER_ADDR: rank 0's. meeting: the variables that say where all meet
    (`RankWorker.listen_for_ranks`).
    """
    addresses = node_addresses(processes, everybody)
    nodes = list(dict.fromkeys(process.node_id for process in everybody or processes))
    return [
        {
            "NODE_RANK": str(nodes.index(process.node_id)),
            "NODE_ID": process.node_id,
            "NODE_ADDRESS": address,
            "MASTER_ADDR": addresses[0],
            **meeting,
        }
        for process, address in zip(processes, addresses, strict=True)
    ]
