"""A driver with replicas that a thread calls and restarts, under which one of Ray's processes is killed (argument).

Prints what the thread raised; ends with the message and the exit code of what the main thread raised.
"""

import sys
import threading

import psutil
from replica_cluster import Driver, cluster_of, replicas, trainer
from test_replicas_end import drive

from megatron_rl.errors import MegatronRLError


def main(victim: str) -> None:
    thread = None
    try:
        with cluster_of(2, 1, kind="ray") as cluster:
            thread = Driver(lambda: drive(replicas(cluster), threading.Event()))
            [process] = [one for one in psutil.Process().children() if one.name() == victim]
            threading.Timer(2.0, process.kill).start()
            trainer(cluster).count(0, 600.0).get()
    finally:
        print("thread:", type(thread.must_end_within(1)).__name__, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except MegatronRLError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
