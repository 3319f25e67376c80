"""Keep the Ray that a run starts for itself on the loopback interface.

Reason: `ray.init` gives its node the machine's own address, and replaces even a loopback address by it. Then
gcs_server, raylet, workers and the metrics port, which asks for no token, listen on all interfaces, although only
processes of this machine need them.
What it does: a node that `ray.init` starts has the address 127.0.0.1, the only one on which Ray's processes listen.
"""

from __future__ import annotations

from typing import Any

from third_party_patches.guard import RAY, Patch

LOOPBACK = "127.0.0.1"


def apply() -> None:
    """Replace `Node`; must run before `ray.init`. Clusters of `ray start` keep their addresses."""
    from ray._private import node

    if node.Node.__module__ == __name__:
        return

    class LoopbackNode(node.Node):
        def __init__(self, ray_params: Any, *args: Any, **kwargs: Any) -> None:
            if kwargs.get("ray_init_cluster"):
                ray_params.update_if_absent(node_ip_address=LOOPBACK)
            super().__init__(ray_params, *args, **kwargs)

    node.Node = LoopbackNode


PATCH = Patch(RAY, apply, drop_when="ray.init(_node_ip_address='127.0.0.1') listens on that address")
