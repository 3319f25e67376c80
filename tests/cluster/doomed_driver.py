"""A driver to be killed: starts a group, prints the pids of its whole process tree, waits in a call.

Arguments: local or ray; the seconds it may take to save after a signal, if it may; modules that ranks are forked with.
"""

import json
import sys

import psutil
from fragile_worker import FragileWorker
from launchers import make_launcher, reserved

from megatron_rl.cluster.pool import ProcessPool
from megatron_rl.cluster.signals import graceful_signals
from megatron_rl.errors import MegatronRLError


def wait(kind: str, grace_s: float | None, modules: list[str]) -> None:
    with (
        graceful_signals(grace_s),
        make_launcher(kind, modules, num_ranks=1) as launcher,
        reserved(launcher, 1) as ranks,
        ProcessPool("toys", ranks, FragileWorker) as group,
    ):
        children = group.host(FragileWorker).start_child().get()
        tree = [process.pid for process in psutil.Process().children(recursive=True)]
        print(json.dumps({"workers": group.pids, "children": children, "tree": tree}), flush=True)
        group.host(FragileWorker).nap(600).get()


if __name__ == "__main__":
    try:
        wait(sys.argv[1], float(sys.argv[2]) if sys.argv[2:] else None, sys.argv[3:])
    except KeyboardInterrupt:
        sys.exit(130)
    except MegatronRLError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
