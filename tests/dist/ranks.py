"""Run a function on N gloo ranks, each in its own process, with a time limit; the answers come back in rank order.

Ranks are forked from one server process that has imported the engines once (`preloaded.py`), and run one function after
the other: `clean_rank.py` takes down what each one has made.
"""

from __future__ import annotations

import functools
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest
from clean_rank import CleanRank

from megatron_rl.cluster.leftovers import RUN_ID
from megatron_rl.cluster.rank_worker import listen
from megatron_rl.cluster.ranks import LOOPBACK
from megatron_rl.cluster.scratch import Scratch
from megatron_rl.cluster.supervision import Supervision
from megatron_rl.roles.environment import worker_environment

FRESH_WORLDS = "MEGATRON_RL_FRESH_WORLDS"
"""Where it is set no world stands: every call has processes of its own (`pytest --fresh-worlds`)."""
GRACE_S = 60.0
"""How long what has been told to end may take, on a machine however busy."""
GROWTH_BYTES = 512 << 20
"""A rank that has grown by this much makes room for a new one."""


@functools.cache
def fork_server() -> ForkServerContext:
    """Started here, for the environment of this moment is the server's.

    The ranks are a run of their own: they keep their temporary files in its scratch folder, and none outlives pytest.
    """
    scratch = Scratch.begin()
    supervision = Supervision(scratch, owns_run=True)
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


def serve(connection: Connection, keeps: bool) -> None:
    """A rank: it runs the function that it is sent and answers; `keeps`: then it cleans up and waits for the next."""
    assert "preloaded" in sys.modules, "the server of ranks could not: import preloaded"
    clean = CleanRank() if keeps else None
    with suppress(EOFError, ConnectionError):
        while True:
            paths, variables, call = connection.recv()
            sys.path[:] = paths
            os.environ |= variables
            connection.send(answer(call))
            if clean is None:
                return
            grace_s = connection.recv()  # when all ranks have answered
            connection.send(cleaned(clean, grace_s))


def answer(call: bytes) -> tuple[str | None, bytes]:
    """(what failed, the pickled value) of a pickled function and its arguments."""
    try:
        function, arguments = pickle.loads(call)
        return None, pickle.dumps(function(*arguments))
    except BaseException:
        return traceback.format_exc(), b""


def cleaned(clean: CleanRank, grace_s: float) -> tuple[list[str], int]:
    """(what is left, bytes that the process has grown by)."""
    try:
        return clean.restore(grace_s), clean.growth()
    except Exception:
        return [f"what could not be taken down:\n{traceback.format_exc()}"], 0


class RankWorld:
    """Processes of ranks, each at the other end of a pipe.

    keeps: they run one function after the other, and clean up after each; else they end with their answer.
    """

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps
        self.processes: list[ForkServerProcess] = []
        self.connections: list[Connection] = []

    def grow(self, size: int) -> None:
        context = fork_server()
        while len(self.processes) < size:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, self.keeps), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.join()
            connection.close()

    def run(self, size: int, function: Callable, arguments: tuple, deadline: float, lost: Collection[int]) -> list[Any]:
        call = pickle.dumps((function, arguments))
        for rank, variables in enumerate(variables_of(size)):
            self.connections[rank].send((sys.path, variables, call))
        values: list[Any] = [None] * size
        for rank, (failure, value) in self.received(set(range(size)) - set(lost), deadline):
            assert failure is None, f"rank {rank} failed:\n{failure}"
            values[rank] = pickle.loads(value)
        return values

    def clean(self, size: int, deadline: float) -> bool:
        """Take down what a function has made on the first ranks; whether they are small enough for another.

        Raises AssertionError with what a function has left behind.
        """
        for connection in self.connections[:size]:
            connection.send(GRACE_S)
        answers = dict(self.received(set(range(size)), deadline))
        left = [f"rank {rank}: {', '.join(names)}" for rank, (names, _) in sorted(answers.items()) if names]
        assert not left, f"left behind in the processes of ranks, which others use: {'; '.join(left)}"
        return max(growth for _, growth in answers.values()) < GROWTH_BYTES

    def received(self, ranks: set[int], deadline: float) -> Iterator[tuple[int, Any]]:
        """The next message of each rank, as they come; raises AssertionError if one dies or none comes in time."""
        waiting = {self.connections[rank]: rank for rank in ranks}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(waiting.values())} timed out"
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    message = connection.recv()
                except (EOFError, ConnectionError):
                    raise AssertionError(f"rank {rank} died without an answer") from None
                yield rank, message


def variables_of(size: int) -> list[dict[str, str]]:
    """Of each rank of a new world, as a launcher sets them."""
    with listen(LOOPBACK) as probe:
        port = probe.getsockname()[1]
    same = {"WORLD_SIZE": str(size), "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    same |= {"NODE_RANK": "0", "NODE_ADDRESS": LOOPBACK, "GLOO_SOCKET_IFNAME": "lo"}
    return [same | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


STANDING: list[RankWorld] = []
"""The world that runs one function after the other; none before the first, and after a failure."""


def run_ranks(
    world_size: int,
    function: Callable,
    *arguments: Any,
    timeout: float = 180,
    lost: Collection[int] = (),
    fresh: bool = False,
) -> list[Any]:
    """`function(*arguments)` on every rank; raises AssertionError with the first rank's traceback, or on a time-out.

    `function` must be importable (a module-level name) and its answer picklable. fresh: in processes of its own, for
    functions that need a process without a past or leave one that has none. lost: ranks that are killed on the way,
    and answer None; then processes are fresh.
    """
    keeps = not (fresh or lost or os.environ.get(FRESH_WORLDS))
    world = STANDING.pop() if keeps and STANDING else RankWorld(keeps)
    try:
        world.grow(world_size)
        results = world.run(world_size, function, arguments, time.monotonic() + timeout, lost)
        for rank in lost:
            world.processes[rank].join(GRACE_S)
        alive = [rank for rank in lost if world.processes[rank].exitcode != -signal.SIGKILL]
        assert not alive, f"ranks {alive} were not killed"
        if keeps:
            keeps = world.clean(world_size, time.monotonic() + GRACE_S + timeout)
    except BaseException:
        world.end()
        raise
    if keeps:
        STANDING.append(world)
    else:
        world.end()
    return results
