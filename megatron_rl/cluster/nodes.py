"""Where ranks run, as each of them must know it: the node's number and address, and where rank 0 is met."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.cluster.worker_process import ProcessInfo

LOOPBACK = "127.0.0.1"


def node_addresses(processes: Sequence[ProcessInfo], everybody: Sequence[ProcessInfo] | None = None) -> list[str]:
    """Where each rank's node is reached, in rank order: the loopback address where all ranks are on one node.

    everybody: the processes of all pools, which reach each other; None: there is one pool.
    """
    is_one = len({process.node_id for process in everybody or processes}) == 1
    return [LOOPBACK if is_one else process.host for process in processes]


def gpu_variables(processes: Sequence[ProcessInfo]) -> list[dict[str, str]]:
    """What shows each rank of a world the GPUs of all its ranks on the same node, in rank order.

    processes: of the world, in rank order, each of which Ray shows its own GPU. LOCAL_RANK becomes the number of a
    rank's own among them. To be set before CUDA is asked for anything.
    """
    mates = [[other for other in processes if other.node_id == one.node_id] for one in processes]
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(mate.gpus for mate in here), "LOCAL_RANK": str(here.index(one))}
        for one, here in zip(processes, mates, strict=True)
    ]


def place_variables(
    processes: Sequence[ProcessInfo], master_port: int, everybody: Sequence[ProcessInfo] | None = None
) -> list[dict[str, str]]:
    """The variables that each rank of a pool needs of where the ranks run, in rank order; everybody: of all pools.

    NODE_RANK: the number of its node, in the order of their first ranks; by Ray's own nodes, so ranks that share a
    machine have one number however many a node was to have. NODE_ADDRESS: its own of `node_addresses`. MASTER_ADDR,
    MASTER_PORT: where rank 0 listens.
    """
    addresses = node_addresses(processes, everybody)
    nodes = list(dict.fromkeys(process.node_id for process in everybody or processes))
    return [
        {
            "NODE_RANK": str(nodes.index(process.node_id)),
            "NODE_ADDRESS": address,
            "MASTER_ADDR": addresses[0],
            "MASTER_PORT": str(master_port),
        }
        for process, address in zip(processes, addresses, strict=True)
    ]
