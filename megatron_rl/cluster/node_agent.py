"""A Ray actor on one node of a pool: it has the node's supervisor start the pool's ranks, and passes messages on."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

import ray

from megatron_rl.cluster.launcher import VISIBLE_GPUS, ProcessInfo
from megatron_rl.cluster.rank_messages import ProcessDied
from megatron_rl.cluster.ray_remote_columns import CopiesHere, Want, read_ranges
from megatron_rl.cluster.scratch import Scratch
from megatron_rl.cluster.supervisor_client import OF_DRIVER, LocalRankProcess, SupervisorClient
from megatron_rl.remote_columns import Range

FIRST_LOOK_S, LAST_LOOK_S = 0.05, 1.0
"""Seconds after which replies are returned while others are missing: first, and at most."""


class AgentRank:
    """One rank of an agent. Ray may deliver calls in another order than they were made: these wait for their turn."""

    def __init__(self) -> None:
        self._process: LocalRankProcess | None = None
        self._next = 0
        self._changed = asyncio.Condition()

    async def started(self, process: LocalRankProcess) -> None:
        """Note the rank's process."""
        async with self._changed:
            self._process = process
            self._changed.notify_all()

    async def process(self) -> LocalRankProcess:
        """Return the rank's process, once it was started."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._process is not None)
        assert self._process is not None
        return self._process

    async def send(self, number: int, message: bytes) -> bytes:
        """Send the message, after those with smaller numbers; return the reply. Raises ProcessDied."""
        process = await self.process()
        async with self._changed:
            await self._changed.wait_for(lambda: self._next == number)
            answer = process.send(message)
            self._next += 1
            self._changed.notify_all()
        reply: bytes = await asyncio.wrap_future(answer)
        return reply


class ToRank(NamedTuple):
    """A message to one rank of a node. key, number: see `NodeAgent`. content: its index among the contents of the call.

    wants: rows that other nodes hold and the rank needs.
    """

    key: int
    number: int
    content: int
    wants: Sequence[Want]


Answers = list[tuple[int, bytes | ProcessDied]]
"""(index of the part, its rank's reply or how the rank has ended)."""


class OpenCalls:
    """Open parts of calls, whose replies the driver does not have yet, by call."""

    def __init__(self) -> None:
        self._missing: dict[int, dict[asyncio.Task[bytes], int]] = {}

    def begin(self, call: int, parts: Sequence[Coroutine[Any, Any, bytes]]) -> None:
        """Run the parts of a call."""
        self._missing[call] = {asyncio.create_task(part): place for place, part in enumerate(parts)}

    async def rest(self, call: int, look_s: float) -> Answers:
        """Return the results that were missing: all of them, or after `look_s` those that have come.

        What fails in a part is the result of that part, and not of the call: its other ranks reply.
        """
        missing = self._missing[call]
        done, _ = await asyncio.wait(missing, timeout=look_s)
        answers = [(missing.pop(task), _answer(task)) for task in done]
        if not missing:
            del self._missing[call]
        return answers

    def __len__(self) -> int:
        return len(self._missing)


def _answer(task: asyncio.Task[bytes]) -> bytes | ProcessDied:
    """Return the result of a task, or, for the driver to report it, why its rank gets no message or gives no reply."""
    error = task.exception()
    if error is None:
        return task.result()
    return error if isinstance(error, ProcessDied) else ProcessDied(f"{type(error).__name__} on its node: {error}")


class NodeAgent:
    """Starts ranks on its node and passes messages on; `key` names a rank, `number` counts the rank's messages,
    `call` those of the driver.

    run_id, modules, variables: see `Scratch.join` and `SupervisorClient`. is_own: the node is that of a Ray which the
    driver has started, and the driver's supervisor starts the ranks.
    """

    def __init__(self, run_id: str, modules: Sequence[str], variables: Mapping[str, str], is_own: bool) -> None:
        name = OF_DRIVER if is_own else f"{OF_DRIVER}_{ray.get_runtime_context().get_node_id()[:12]}"
        self._supervision = SupervisorClient(Scratch.join(run_id), modules, variables, name=name)
        self._ranks: defaultdict[int, AgentRank] = defaultdict(AgentRank)
        self._copies = CopiesHere(ray.get_runtime_context().get_node_id())
        self._open = OpenCalls()

    async def start(self, key: int, local_rank: int, variables: dict[str, str]) -> ProcessInfo:
        """Start a rank and describe it once it is up; local_rank: the index of its GPU."""
        gpus = visible_gpus()
        gpu = gpus[local_rank] if gpus else ""
        node, host = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        process = self._supervision.start(variables, node, host, gpu, read=bytes)
        await self._ranks[key].started(process)
        return await asyncio.wrap_future(process.info)

    async def gpus(self) -> list[str]:
        """Return the GPUs of the node's ranks, in the form of VISIBLE_GPUS."""
        return visible_gpus()

    async def until_lost(self) -> None:
        """Do not return: the caller sees the loss of this agent."""
        await asyncio.Event().wait()

    async def send(self, call: int, parts: Sequence[ToRank], *contents: bytes) -> Answers:
        """Send ranks their messages, and return the replies.

        It returns when all ranks have replied, or after FIRST_LOOK_S without the missing replies, which `rest` returns:
        a rank's failure is not kept back by ranks that wait for it.
        """
        self._open.begin(call, [self._send(part, contents[part.content]) for part in parts])
        return await self.rest(call, FIRST_LOOK_S)

    async def rest(self, call: int, look_s: float) -> Answers:
        """Return the replies that were missing: all of them, or after `look_s` those that have come."""
        return await self._open.rest(call, look_s)

    async def _send(self, part: ToRank, message: bytes) -> bytes:
        """Return the rank's reply. Raises ProcessDied."""
        if part.wants:
            await self._copies.fetch(part.wants)
        return await self._ranks[part.key].send(part.number, message)

    async def read_held(self, path: str, ranges: Sequence[Range]) -> Any:
        """Return bytes of a segment of this node end to end, as a uint8 array."""
        return await asyncio.to_thread(read_ranges, path, ranges)

    async def take_held(self, files: Sequence[tuple[str, str, int]]) -> list[Any]:
        """Remove segments of this node and return their bytes, each as a uint8 array: (path, node, size)."""
        contents = [await self.read_held(path, [(0, size)]) for path, _, size in files]
        self._copies.free([(path, node) for path, node, _ in files])
        return contents

    async def take_over(self, wants: Sequence[Want]) -> bool:
        """Move whole segments of other nodes to this one; returns whether it has room, else they stay."""
        return await self._copies.take_over(wants)

    async def free_held(self, paths: Sequence[tuple[str, str]]) -> None:
        """Remove segments, and copies of segments: (path, its owner's node)."""
        self._copies.free(paths)

    async def end_of(self, key: int) -> str:
        """Return how a rank has ended, once it has."""
        process = await self._ranks[key].process()
        return await asyncio.wrap_future(process.ended)

    async def segments(self) -> list[str]:
        """Return the names of the run's segments on this node."""
        return self._supervision.scratch.segments()

    async def kill(self, key: int) -> None:
        """Kill a rank."""
        (await self._ranks[key].process()).kill()


def visible_gpus() -> list[str]:
    """Return the GPUs that Ray has given this process."""
    return [gpu for gpu in os.environ.get(VISIBLE_GPUS, "").split(",") if gpu]
