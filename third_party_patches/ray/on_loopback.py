"""Keep the Ray that a run starts for itself on the loopback interface.

Reason: `ray.init` gives its node the machine's own address, and replaces even a loopback address by it. Then
gcs_server, raylet, workers and the metrics port, which asks for no token, listen on all interfaces, although only
processes of this machine need them.
What it does: a node that `ray.init` starts has the address 127.0.0.1, the only one on which Ray's processes listen. So
does RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, but Ray reads it on import, before a run knows whether it starts a node.
"""

from __future__ import annotations

from third_party_patches.guard import RAY, Patch


def apply() -> None:
    """Set the constant; must run before `ray.init`. Clusters of `ray start` keep their addresses."""
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False


PATCH = Patch(RAY, apply, drop_when="ray.init(_node_ip_address='127.0.0.1') listens on that address")
