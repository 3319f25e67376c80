"""Give the shared memory of vLLM's message queues names that contain the id of their run.

Reason: Python calls these segments `psm_` and a random number. When all processes of a job are killed, also the process
that would remove the segments, they hold their memory until the machine restarts, and their owner is unknown.
What it does: the names begin with the run's id, by which the next run's start finds what dead runs have left.
"""

from __future__ import annotations

import os
import uuid
from multiprocessing import shared_memory
from types import SimpleNamespace
from typing import Any

from third_party_patches.guard import VLLM, Patch


class RunMemory(shared_memory.SharedMemory):
    """Shared memory that is created under a name with the run's id, where the process belongs to a run."""

    def __init__(self, name: str | None = None, create: bool = False, size: int = 0, **others: Any) -> None:
        if create and name is None and "MEGATRON_RL_RUN" in os.environ:
            name = f"megatron_rl-{os.environ['MEGATRON_RL_RUN']}-{uuid.uuid4().hex}"
        super().__init__(name, create, size, **others)


def apply() -> None:
    """Replace the module that queues and groups take shared memory from; must run before an engine creates groups."""
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import shm_broadcast

    for module in (parallel_state, shm_broadcast):
        module.shared_memory = SimpleNamespace(SharedMemory=RunMemory)


PATCH = Patch(
    VLLM,
    apply,
    drop_when="vLLM takes the names of its shared memory from its caller, or removes them once they are mapped",
)
