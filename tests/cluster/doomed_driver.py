"""A driver to be killed: starts a pool and a group, prints the pids of its whole process tree, waits in a call.

One argument, optional: the seconds it may take to save after a signal.
"""

import json
import sys

import psutil
from fragile_worker import FragileWorker

from megatron_rl.cluster.ray_pool import RayPool
from megatron_rl.cluster.resource_pool import ResourcePool
from megatron_rl.cluster.signals import graceful_signals
from megatron_rl.errors import MegatronRLError


def wait(grace_s: float | None) -> None:
    with graceful_signals(grace_s), ResourcePool(1, 1, "cpu") as pool, RayPool("toys", pool, FragileWorker) as group:
        children = group.host(FragileWorker).start_child().get()
        tree = [process.pid for process in psutil.Process().children(recursive=True)]
        print(json.dumps({"workers": group.pids, "children": children, "tree": tree}), flush=True)
        group.host(FragileWorker).nap(600).get()


if __name__ == "__main__":
    try:
        wait(float(sys.argv[1]) if sys.argv[1:] else None)
    except KeyboardInterrupt:
        sys.exit(130)
    except MegatronRLError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
