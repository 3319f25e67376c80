"""Starts the ranks of one world, waits for what they measured, and leaves none of them behind."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from megatron_rl.errors import WorkerFailure
from megatron_rl.profiling.samples import Task, World, read_samples, slowest, write_task
from megatron_rl.roles.environment import started_with, worker_environment

LOOPBACK = "127.0.0.1"
"""All ranks of a world are on this machine."""
POLL_S = 0.1
TAIL = 12
"""Lines of a failed rank's output that are shown."""


def run_world(task: Task, config: Path, folder: Path, ranks_per_machine: int, time_limit_s: float) -> World:
    """Every rank of the task's world in a process of its own, on this machine.

    folder: new, for their files. ranks_per_machine: that a rank's threads are counted for. Raises WorkerFailure when
    one fails, or when they take longer than the limit.
    """
    folder.mkdir()
    write_task(task, folder / "task.json")
    with ExitStack() as opened:
        listener = opened.enter_context(socket.create_server((LOOPBACK, 0), backlog=task.world_size))
        variables = worker_environment(task.device, ranks_per_machine)
        variables |= {"WORLD_SIZE": str(task.world_size), "LOCAL_WORLD_SIZE": str(task.world_size), "NODE_RANK": "0"}
        variables |= {"NODE_ADDRESS": LOOPBACK, "MASTER_ADDR": LOOPBACK}
        variables |= {"MASTER_PORT": str(listener.getsockname()[1]), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        processes = []
        for rank in range(task.world_size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            hands_over = rank == 0 and task.world_size > 1
            own |= {"MASTER_LISTEN_FD": str(listener.fileno())} if hands_over else {}
            output = opened.enter_context((folder / f"output_{rank}.txt").open("w"))
            process = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl.profiling.rank", *_arguments(folder, config, rank)],
                env=started_with(variables | own),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(listener.fileno(),) if hands_over else (),
            )
            opened.callback(_end, process)
            processes.append(process)
        _wait(processes, folder, time_limit_s)
    ranks = [read_samples(folder / f"answer_{rank}.json") for rank in range(task.world_size)]
    return World(task, slowest(ranks))


def _arguments(folder: Path, config: Path, rank: int) -> list[str]:
    return [str(folder / "task.json"), str(config), str(folder / f"answer_{rank}.json")]


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, time_limit_s: float) -> None:
    deadline = time.monotonic() + time_limit_s
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
        if failed:
            break
        if time.monotonic() > deadline:
            raise WorkerFailure(f"measuring took longer than {time_limit_s:.0f} s, and was ended")
        time.sleep(POLL_S)
    failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
    if failed:
        lines = (folder / f"output_{failed[0]}.txt").read_text(errors="replace").splitlines()[-TAIL:]
        raise WorkerFailure("\n".join([f"rank {failed[0]} of {len(processes)} could not measure:", *lines]))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
