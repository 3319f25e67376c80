"""What ranks are told of the nodes they run on."""

from __future__ import annotations

from megatron_rl.cluster.launcher import ProcessInfo
from megatron_rl.cluster.ranks import place_variables


def test_nodes_are_numbered_by_their_first_ranks() -> None:
    """By Ray's nodes, in whatever order ranks lie on them; rank 0's address is where all meet."""
    hosts = {"b": "10.0.0.7", "a": "10.0.0.3"}
    processes = [ProcessInfo(100 + rank, node, hosts[node]) for rank, node in enumerate("bbaab")]
    found = place_variables(processes, {"MASTER_PORT": "5000"})
    assert [variables["NODE_RANK"] for variables in found] == ["0", "0", "1", "1", "0"]
    assert [variables["NODE_ADDRESS"] for variables in found] == [hosts[node] for node in "bbaab"]
    assert {(variables["MASTER_ADDR"], variables["MASTER_PORT"]) for variables in found} == {("10.0.0.7", "5000")}


def test_ranks_of_one_node_stay_on_the_loopback_interface() -> None:
    """And meet where rank 0 says. Would not catch a store that is elsewhere all the same."""
    (variables,) = place_variables([ProcessInfo(1, "a", "10.0.0.3")], {"MASTER_STORE": "/run/store_1"})
    assert variables == {
        "NODE_RANK": "0",
        "NODE_ID": "a",
        "NODE_ADDRESS": "127.0.0.1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_STORE": "/run/store_1",
    }
