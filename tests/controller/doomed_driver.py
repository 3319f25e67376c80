"""A driver to be killed: starts a pool and a group, prints the pids of its whole process tree, waits in a call."""

import json

import psutil
from fragile_worker import FragileWorker

from megatron_rl.controller.resource_pool import ResourcePool
from megatron_rl.controller.signals import graceful_signals
from megatron_rl.controller.worker_group import WorkerGroup

if __name__ == "__main__":
    with graceful_signals(), ResourcePool(1, 1, "cpu") as pool, WorkerGroup(pool, FragileWorker) as group:
        children = group.start_child().get()
        tree = [process.pid for process in psutil.Process().children(recursive=True)]
        print(json.dumps({"workers": group.pids, "children": children, "tree": tree}), flush=True)
        group.nap(600).get()
