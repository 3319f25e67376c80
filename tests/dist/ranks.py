"""Run a function on N gloo ranks, each in its own process, with a time limit; the answers come back in rank order.

Ranks are forked from one server process that has imported the engines once (`preloaded.py`).
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing as mp
import os
import pickle
import queue
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_rl.cluster.ranks import LOOPBACK
from megatron_rl.cluster.scratch import Scratch
from megatron_rl.cluster.stale_processes import RUN_ID
from megatron_rl.cluster.supervisor_client import SupervisorClient
from megatron_rl.roles.environment import worker_environment


@functools.cache
def fork_server() -> ForkServerContext:
    """Started here, for the environment of this moment is the server's.

    The ranks are a run of their own: they keep their temporary files in its scratch folder, and none outlives pytest.
    """
    scratch = Scratch.begin()
    supervision = SupervisorClient(scratch, owns_run=True)
    Finalize(None, scratch.remove, exitpriority=-300)
    Finalize(None, supervision.close, [True], exitpriority=-200)  # after multiprocessing has removed its own folder
    os.environ |= worker_environment("cpu", ranks_per_node=os.cpu_count())
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    # The server knows no other way to this folder, and passes over what it cannot import.
    others = os.environ.get("PYTHONPATH")
    variables = {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [others])]),
        "TMPDIR": str(scratch.folder),
        RUN_ID: scratch.run_id,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr(tempfile, "tempdir", variables["TMPDIR"])  # where the server's own socket goes
        forkserver.ensure_running()
    return context


def enter(rank: int, variables: dict[str, str], function: Callable, arguments: tuple, answers) -> None:
    os.environ |= variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    try:
        assert "preloaded" in sys.modules, "the server of ranks could not: import preloaded"
        # Pickled by value here: a tensor put on the queue itself would need this process to outlive its reader.
        answers.put((rank, None, pickle.dumps(function(*arguments))))
    except BaseException:
        answers.put((rank, traceback.format_exc(), b""))


@contextlib.contextmanager
def meeting_place(world_size: int) -> Iterator[dict[str, str]]:
    """Yield the variables by which `world_size` ranks meet: at a new file, or at a store that this process serves.

    This process serves the store from the moment when it gets a port, so no other process can take the port. It also
    outlives all ranks, so no rank has to wait for others at its end.
    """
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    place = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port)}
    place["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # has torch let rank 0 connect, too, and not serve
    place |= {"NODE_RANK": "0", "NODE_ADDRESS": LOOPBACK, "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        # Shared memory has the name of the file, so it must be unique.
        yield place | {"MASTER_STORE": f"{folder}/store_{Path(folder).name}"}


def common_store(timeout: timedelta) -> dist.Store:
    """Connect this rank to the store that its `meeting_place` serves."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)


def run_ranks(
    world_size: int, function: Callable, *arguments: Any, timeout: float = 180, lost: Collection[int] = ()
) -> list[Any]:
    """`function(*arguments)` on every rank; raises AssertionError with the first rank's traceback, or on a time-out.

    `function` must be importable (a module-level name) and its answer picklable. lost: ranks that are killed on the
    way, and answer None.
    """
    context = fork_server()
    answers = context.Queue()
    with meeting_place(world_size) as variables:
        processes = [
            context.Process(target=enter, args=(rank, variables, function, arguments, answers), daemon=True)
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            results = collect(processes, answers, timeout, lost)
            alive = [rank for rank in lost if processes[rank].exitcode != -signal.SIGKILL]
            assert not alive, f"ranks {alive} were not killed"
            return results
        finally:
            for process in processes:
                process.kill()
                process.join()


def collect(processes: list, answers, timeout: float, lost: Collection[int] = ()) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    while len(results) < len(processes) - len(lost):
        try:
            rank, failure, value = answers.get(timeout=1)
        except queue.Empty:
            dead = [r for r, p in enumerate(processes) if not p.is_alive() and r not in results and r not in lost]
            assert not dead, f"ranks {dead} died without an answer"
            missing = sorted(set(range(len(processes))) - set(results) - set(lost))
            assert time.monotonic() < deadline, f"ranks {missing} timed out"
            continue
        assert failure is None, f"rank {rank} failed:\n{failure}"
        results[rank] = pickle.loads(value)
    return [results.get(rank) for rank in range(len(processes))]
