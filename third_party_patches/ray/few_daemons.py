"""Start Ray without the processes that a run does not use.

Reason: `ray.init` starts three processes that a run on one machine does not use: a dashboard server, which it waits
for, even with `include_dashboard=False`; a log monitor, even with `log_to_driver=False`; and an autoscaler. They take
270 MB, 1 to 4 CPU seconds and a second of every start. The autoscaler shows its metrics to everybody.
What it does: none of them is started. `ray list` needs a full dashboard, so it does not work without this patch either.
`ray status` needs the autoscaler and does not work with this patch.
"""

from __future__ import annotations

from third_party_patches.guard import RAY, Patch


def start_nothing(node: object, **asked: object) -> None:
    """Replace the three methods of Ray's `Node` with which `ray.init` starts these processes."""


def apply() -> None:
    """Replace the methods; must run before `ray.init`. Clusters of `ray start` have their own."""
    from ray._private import node

    node.Node.start_api_server = start_nothing
    node.Node.start_log_monitor = start_nothing
    node.Node.start_monitor = start_nothing


PATCH = Patch(
    RAY,
    apply,
    drop_when="ray.init starts no dashboard server where none is wanted, and neither log monitor nor autoscaler",
)
