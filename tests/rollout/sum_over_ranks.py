"""A program: vLLM's all-reduce in shared memory over as many ranks as each argument says; prints what rank 0 gets.

A process of its own, which computes nothing before it forks: a copy of a process with OpenMP's threads would hang.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import uuid
from multiprocessing.synchronize import Barrier

import torch
from vllm.platforms import current_platform

PATIENCE_S = 60.0


def said_by(rank: int, num_ranks: int, name: str, together: Barrier) -> str:
    """What this rank says: right, wrong, or the first line of an error."""
    try:
        handle = torch.ops._C.init_shm_manager(name, num_ranks, rank, 1)
        together.wait(PATIENCE_S)  # until all have made their part
        torch.ops._C.join_shm_manager(handle, name)
        together.wait(PATIENCE_S)
    except RuntimeError as error:
        together.abort()  # the others would wait for this rank
        return str(error).partition("\n")[0]
    tensor = torch.full((64,), float(rank + 1))
    try:
        torch.ops._C.shm_allreduce(handle, tensor)
    except RuntimeError as error:  # nobody waits any more, and rank 0 may not have left the last wait
        return str(error).partition("\n")[0]
    return "right" if bool((tensor == num_ranks * (num_ranks + 1) / 2).all()) else "wrong"


def sum_over(num_ranks: int) -> None:
    """Fork the ranks; rank 0 prints."""
    name, pids, together = f"test-{uuid.uuid4().hex}", [], multiprocessing.Barrier(num_ranks)
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            said = said_by(rank, num_ranks, name, together)
            if rank == 0:
                print(num_ranks, said, flush=True)
            os._exit(0)
        pids.append(pid)
    os.waitpid(pids[0], 0)
    for pid in pids[1:]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for file in os.listdir("/dev/shm"):
        if name in file:
            os.unlink(f"/dev/shm/{file}")


if __name__ == "__main__":
    current_platform.import_kernels()
    torch.set_num_threads(1)
    for argument in sys.argv[1:]:
        sum_over(int(argument))
