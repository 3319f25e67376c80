"""Start the ranks of one world, wait for their samples, and leave no process behind."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from megatron_rl.cluster.fork_server import fork_command
from megatron_rl.cluster.leftovers import RUN_ID
from megatron_rl.cluster.reaper import Reaper
from megatron_rl.errors import WorkerFailure
from megatron_rl.profile.samples import MeasuringTask, World, read_samples, slowest, write_task
from megatron_rl.roles.environment import started_with, worker_environment
from megatron_rl.roles.preloaded import preloaded

LOOPBACK = "127.0.0.1"
"""All ranks of a world are on this machine."""
POLL_S = 0.1
TAIL = 12
"""Lines of a failed rank's output that are shown."""


class Worlds:
    """Starts worlds of ranks on this machine, one after the other; ends whatever they leave behind, also when this
    process is killed.

    ranks_per_machine: that a rank's threads are counted for.
    """

    def __init__(self, ranks_per_machine: int) -> None:
        self._ranks_per_machine = ranks_per_machine
        self._reaper: Reaper

    def __enter__(self) -> Worlds:
        """Raises ConfigError where there is no place for files."""
        self._reaper = Reaper()
        with self._reaper.watching():
            return self

    def __exit__(self, *error: object) -> None:
        self._reaper.stop()

    @property
    def folder(self) -> Path:
        """A folder for files that must not outlive the profile."""
        return self._reaper.scratch.folder

    def run(self, task: MeasuringTask, config: Path, folder: Path, time_limit_s: float) -> World:
        """Run every rank of the task's world in a process of its own.

        folder: new, for their files. Raises WorkerFailure when one fails, or when they take longer than the limit.
        """
        folder.mkdir()
        write_task(task, folder / "task.json")
        with ExitStack() as opened:
            listener = opened.enter_context(socket.create_server((LOOPBACK, 0), backlog=task.world_size))
            python, shared = self._python(task.device)
            shared |= {"WORLD_SIZE": str(task.world_size), "LOCAL_WORLD_SIZE": str(task.world_size), "NODE_RANK": "0"}
            shared |= {"NODE_ADDRESS": LOOPBACK, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(listener.getsockname()[1])}
            processes = []
            for rank in range(task.world_size):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                hands_over = rank == 0 and task.world_size > 1
                own |= {"MASTER_LISTEN_FD": "0"} if hands_over else {}
                output = opened.enter_context((folder / f"output_{rank}.txt").open("w"))
                process = subprocess.Popen(
                    [*python, "-m", "megatron_rl.profile.rank_process", *_arguments(folder, config, rank)],
                    env=started_with(shared | own),
                    # A process that is forked elsewhere gets its standard files, and no other.
                    stdin=listener.fileno() if hands_over else subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                opened.callback(_end, process)
                processes.append(process)
            _wait(processes, folder, time_limit_s)
        ranks = [read_samples(folder / f"answer_{rank}.json") for rank in range(task.world_size)]
        return World(task, slowest(ranks))

    def _python(self, device: str) -> tuple[list[str], dict[str, str]]:
        """Return the command prefix and the variables of a rank. On CPUs ranks are forked, as in a run."""
        shared = worker_environment(device, self._ranks_per_machine)
        shared |= {"TORCH_CPP_LOG_LEVEL": "ERROR", RUN_ID: self._reaper.scratch.run_id}
        modules = preloaded(device, generates=True)
        return shlex.split(fork_command(modules, shared)) if modules else [sys.executable], shared


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
