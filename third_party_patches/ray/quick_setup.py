"""Set up a worker that has an environment of its own without importing Ray for it.

Reason: a raylet starts such a worker, and every rank is one, through `setup_worker.py`, which sets variables and then
becomes the worker. It imports all of Ray, which takes 0.7 to 1.5 CPU seconds of each rank's start.
What it does: raylets that this process starts run `workers/setup_worker.py`, which does it in 0.05 s.
"""

from __future__ import annotations

from third_party_patches.guard import RAY, Patch
from third_party_patches.ray.workers import setup_worker


def apply() -> None:
    """Name our file where Ray's nodes look for theirs; must run before `ray.init`."""
    from ray._private import ray_constants

    # Ray joins it to its own folder's path, which an absolute path replaces.
    ray_constants.SETUP_WORKER_FILENAME = setup_worker.__file__


PATCH = Patch(RAY, apply, drop_when="Ray's own setup_worker.py imports no more than it needs")
