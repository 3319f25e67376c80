"""A driver to be killed: ranks on several nodes of a cluster that it joins, and a call that they are in.

Arguments: nodes, ranks of each. Prints the run's id and the nodes' addresses.
"""

import json
import sys

from fragile_worker import FragileWorker

from megatron_rl.cluster.pool import ProcessPool
from megatron_rl.cluster.ray_launcher import RayLauncher
from megatron_rl.cluster.signals import graceful_signals
from megatron_rl.config.roles import PoolSize


def wait(num_nodes: int, per_node: int) -> None:
    with (
        graceful_signals(None),
        RayLauncher(num_nodes * per_node, "cpu", ("fragile_worker",)) as launcher,
        launcher.reserve(PoolSize(num_nodes, per_node)) as ranks,
        ProcessPool("toys", ranks, FragileWorker) as pool,
    ):
        napping = pool.host(FragileWorker)
        napping.nap(0).get()
        hosts = sorted({process.host for process in pool.processes.infos})
        print(json.dumps({"run": launcher.run_id, "hosts": hosts}), flush=True)
        napping.nap(600).get()


if __name__ == "__main__":
    try:
        wait(*map(int, sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
