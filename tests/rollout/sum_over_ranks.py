"""A program: vLLM's all-reduce in shared memory over as many ranks as each argument says; prints what rank 0 gets.

A process of its own, which computes nothing before it forks: a copy of a process with OpenMP's threads would hang.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid

import torch
from vllm.platforms import current_platform


def said_by(rank: int, num_ranks: int, name: str) -> str:
    """What this rank says: right, wrong, or the first line of an error."""
    try:
        handle = torch.ops._C.init_shm_manager(name, num_ranks, rank, 1)
        time.sleep(0.4)  # until all have made their part
        torch.ops._C.join_shm_manager(handle, name)
        time.sleep(0.4)
        tensor = torch.full((64,), float(rank + 1))
        torch.ops._C.shm_allreduce(handle, tensor)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return "right" if bool((tensor == num_ranks * (num_ranks + 1) / 2).all()) else "wrong"


def sum_over(num_ranks: int) -> None:
    """Fork the ranks; rank 0 prints."""
    name, pids = f"test-{uuid.uuid4().hex}", []
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            said = said_by(rank, num_ranks, name)
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
