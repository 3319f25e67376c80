"""A driver with replicas on two nodes of a cluster, one of which its reader ends once it has read a line.

Prints the nodes of the replicas; then, as JSON, what became of a call of each, of the restart of the one that failed,
the seconds that the restart took, and what the others answered meanwhile.
"""

import json
import time

from replica_cluster import cluster_of, replicas, sampler, trainer
from replica_worker import ReplicaHost

from megatron_rl.cluster.heartbeat import HeartbeatLimits
from megatron_rl.cluster.waiting import wait_any
from megatron_rl.errors import WorkerFailure

RESTART_LIMIT_S = 15.0


def main() -> None:
    with cluster_of(2, 2, HeartbeatLimits(heartbeat_timeout_s=20), num_nodes=2, kind="ray") as cluster:
        both = replicas(cluster)
        places = [one.host(ReplicaHost).where().get()[0][1] for one in both]
        train_node = cluster.pools["train"].host(ReplicaHost).where().get()[0][1].node
        print(json.dumps([place.node_address for place in places]), flush=True)
        calls = [sampler(one).sleep_on(0, 600.0) for one in both]
        [failed] = wait_any(calls, timeout=60)
        lost = both[calls.index(failed)]
        told = {"lost_node": places[lost.number].node_address, "train_survives": train_node != places[lost.number].node}
        told["loss"] = what_it_raises(failed)
        began, told["restarts"] = time.monotonic(), []
        while not told["restarts"] or "node gone" not in told["restarts"][-1]:  # sooner while Ray does not know yet
            told["restarts"].append(what_it_raises(lost.restart(RESTART_LIMIT_S)))
        told["seconds"] = time.monotonic() - began
        told["trained"] = trainer(cluster).count(5).get()[0][0]
        told["other_error"] = str(both[1 - lost.number].error)
        [other] = [one for one in calls if one is not failed]
        told["other_waits"] = wait_any([other], timeout=2) == []
        both[1 - lost.number].restart().get()
        told["other_again"] = sampler(both[1 - lost.number]).count(6).get()[0][0]
    print(json.dumps(told), flush=True)


def what_it_raises(future) -> str:
    try:
        future.get()
    except WorkerFailure as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
