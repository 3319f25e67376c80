"""Start Ray's daemons in sessions of their own.

Reason: gcs_server, raylet and their children are in the driver's process group. Schedulers, service managers and
terminals signal that whole group. The signal ends these daemons at once, while the driver still saves; a driver without
them waits for a minute and is aborted.
What it does: the daemons that `ray.init` starts lead sessions of their own. They still end with the driver, because the
kernel kills them when their parent dies.
"""

from __future__ import annotations

from typing import Any

from third_party_patches.guard import RAY, Patch


def apply() -> None:
    """Replace `ConsolePopen`, the class of every daemon's process; must run before `ray.init`."""
    from ray._private import services

    if services.ConsolePopen.__module__ == __name__:
        return

    class SessionLeader(services.ConsolePopen):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"start_new_session": True})

    services.ConsolePopen = SessionLeader


PATCH = Patch(RAY, apply, drop_when="ray.init can start its processes in a session of their own")
