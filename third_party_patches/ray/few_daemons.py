"""Start Ray without the processes that a run does not use.

Reason: `ray.init` starts a dashboard server, though `include_dashboard=False` leaves it nothing to serve, and waits for
it, a log monitor, though with `log_to_driver=False` nobody reads what it sends, and an autoscaler, though nothing can
be added to one machine: 270 MB, 1 to 4 CPU seconds and a second of every start on one machine. The autoscaler answers
everybody who asks for its metrics.
What it does: none is started. `ray list`, which asks the dashboard server, does not work without this patch either;
`ray status`, which shows what the autoscaler knows, does not work with it.
"""

from __future__ import annotations

from third_party_patches.guard import RAY, Patch


def start_nothing(node: object, **asked: object) -> None:
    """Stand in for three methods of Ray's `Node`, which `ray.init` calls for what is not needed here."""


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
