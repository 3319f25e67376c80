"""Remote columns on the nodes of a Ray cluster: agents read, copy and free their nodes' files.

A rank maps the files of its own node. Of those of other nodes, its agent asks their agents for the rows that a message
needs, before it passes the message on: Ray's object store moves them from node to node.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import ray
import torch
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from megatron_rl.cluster.rank_messages import ProcessDied, answer_of
from megatron_rl.cluster.scratch import SEGMENTS
from megatron_rl.cluster.shm_files import LEFT_FREE, place_on, write
from megatron_rl.errors import WorkerFailure
from megatron_rl.remote_columns import Part, Range, RemoteColumn, RemoteSegment

Wanted = list[tuple[RemoteSegment, list[Range]]]


class Want(NamedTuple):
    """Bytes of a segment of another node. size: of its file. owner: its node, which `agent` is on."""

    path: str
    size: int
    owner: str
    agent: ActorHandle
    ranges: list[Range]


class RayRemoteColumns:
    """The driver's access to held columns: it reads and frees them through agents on their nodes."""

    keeps_values = False

    def __init__(self) -> None:
        self._agents: defaultdict[str, list[ActorHandle]] = defaultdict(list)
        self._lasting: list[tuple[str, ActorHandle]] = []
        self._freed: deque[tuple[str, str]] = deque()
        self._copies: defaultdict[str, set[str]] = defaultdict(set)
        self._changing = threading.Lock()

    def note(self, node: str, agent: ActorHandle, lasts: bool = True) -> None:
        """Note an agent of a node. lasts: the run does not continue without the agent's ranks."""
        with self._changing:
            if not any(agent is other for other in self._agents[node]):
                self._agents[node].append(agent)
            if lasts and not any(agent is other for _, other in self._lasting):
                self._lasting.append((node, agent))

    def forget(self, agent: ActorHandle) -> None:
        """Note that an agent has ended."""
        with self._changing:
            for node, agents in self._agents.items():
                self._agents[node] = [other for other in agents if other is not agent]
            self._lasting = [(node, other) for node, other in self._lasting if other is not agent]

    def read(self, segment: RemoteSegment, ranges: Sequence[Range]) -> list[torch.Tensor]:
        """Return the elements of each range [n, *element]. Raises WorkerFailure where the node or the file is gone."""
        try:
            content = ray.get(self.agent_on(segment).read_held.remote(segment.path, in_bytes(segment, ranges)))
        except RayError as error:
            raise WorkerFailure(f"a remote column of node {segment.node} is gone: {error}", is_loss=True) from None
        values = torch.from_numpy(content.copy()).view(segment.dtype).view(-1, *segment.shape[1:])
        return list(values.split([stop - start for start, stop in ranges]))

    def free(self, path: str, node: str) -> None:
        """Have the file and its copies removed with the next message: this may run in any thread, amid any call."""
        self._freed.append((path, node))

    def remove_freed(self) -> None:
        """Have the agents remove what was freed."""
        freed = defaultdict(list)
        while self._freed:
            path, owner = self._freed.popleft()
            for node in (owner, *self._copies.pop(path, ())):
                freed[node].append((path, owner))
        with self._changing:
            asked = [(agent, paths) for node, paths in freed.items() for agent in self._agents[node]]
        for agent, paths in asked:
            agent.free_held.remote(paths)

    def wants(self, wanted: Wanted, node: str) -> list[Want]:
        """Return what a node must be given of segments. Raises WorkerFailure where a node of them is gone."""
        wants = []
        for segment, ranges in wanted:
            if segment.node != node:
                self._copies[segment.path].add(node)
                place = (segment.path, segment.num_bytes, segment.node, self.agent_on(segment))
                wants.append(Want(*place, in_bytes(segment, ranges)))
        return wants

    def lasting_agent(self, node: str) -> tuple[str, ActorHandle] | None:
        """Return (node, agent) without which the run does not continue, of this node if it is one; None: all may be
        lost."""
        with self._changing:
            own = [each for each in self._lasting if each[0] == node]
            return next(iter([*own, *self._lasting]), None)

    def agent_on(self, segment: RemoteSegment) -> ActorHandle:
        """Return an agent of a segment's node. Raises WorkerFailure where the node is gone."""
        with self._changing:
            agents = self._agents[segment.node]
        if not agents:
            raise WorkerFailure(f"a remote column of node {segment.node} is gone with its ranks", is_loss=True)
        return agents[-1]


def in_bytes(segment: RemoteSegment, ranges: Sequence[Range]) -> list[Range]:
    """Return ranges of elements as ranges of bytes of the file."""
    size = segment.element_bytes
    return [(start * size, stop * size) for start, stop in ranges]


def wanted_of(held: Sequence[RemoteColumn]) -> Wanted:
    """Return the segments of several columns, with the elements that are needed of each."""
    return [wanted for column in held for wanted in column.wanted()]


def read_ranges(path: str, ranges: Sequence[Range]) -> Any:
    """Return bytes of a file end to end, as a uint8 array. Raises FileNotFoundError where it was freed."""
    content, place = numpy.empty(sum(stop - start for start, stop in ranges), numpy.uint8), 0
    into: Any = content  # a buffer, which numpy's types do not say
    with open(path, "rb", buffering=0) as file:
        for start, stop in ranges:
            file.seek(start)
            while start < stop:
                read = file.readinto(into[place : place + stop - start])
                if not read:
                    raise EOFError(f"{path} ends at byte {start}")
                start, place = start + read, place + read
    return content


def future_of(
    answer: ObjectRef, read: Callable[[Any], Any] = lambda value: value, lost: Callable[[], None] = lambda: None
) -> Future[Any]:
    """Return the future of a call of an agent; it raises ProcessDied also where the agent, or its node, has died.

    lost: called then, before the future is ready.
    """
    future: Future[Any] = Future()

    def pass_on(done: Future[Any]) -> None:
        try:
            future.set_result(read(done.result()))
        except RayTaskError as error:
            future.set_exception(error.cause if isinstance(error.cause, ProcessDied) else ProcessDied(str(error)))
        except RayError as error:
            lost()
            details = [line for line in str(error).splitlines()[1:] if not line.startswith("\t")]
            future.set_exception(ProcessDied("\n".join(details) or str(error)))
        except Exception as error:
            future.set_exception(error)

    answer.future().add_done_callback(pass_on)
    return future


def read_future(reply: Future[Any], read: Callable[[Any], Any]) -> Future[Any]:
    """Return the future of what `read` makes of a result; whatever fails is its failure."""
    future: Future[Any] = Future()

    def pass_on(done: Future[Any]) -> None:
        try:
            future.set_result(read(done.result()))
        except Exception as error:
            future.set_exception(error)

    reply.add_done_callback(pass_on)
    return future


class ReplyToKeep:
    """A reply of ranks that the run may lose: its columns move to a node that stays, before the reply counts.

        reply of a replica --which segments--> a lasting node's agent copies the files --> the reply names the copies

    A run continues without a replica and trains on all that it has answered. A node that is lost before the copies
    exist is lost without its reply. Where the lasting node has no room, or there is none, the columns pass through the
    driver. kept: the content, once the columns are in their place.
    """

    def __init__(self, reply: Future[bytes], held: RayRemoteColumns) -> None:
        self.kept: Future[Any] = Future()
        self._held = held
        self._reply = b""
        self._leaving: list[RemoteSegment] = []
        self._then(reply, self._take)

    def _then(self, done: Future[Any], next_step: Callable[[Any], None]) -> None:
        """Continue with the result; whatever fails is the reply's failure."""

        def step(finished: Future[Any]) -> None:
            try:
                next_step(finished.result())
            except Exception as error:
                self.kept.set_exception(error)

        done.add_done_callback(step)

    def _take(self, reply: bytes) -> None:
        self._reply, found = reply, list[RemoteSegment]()

        def note(segment: RemoteSegment) -> Part:
            found.append(segment)
            return segment

        answer_of(reply, self._held, note)
        stays = self._held.lasting_agent(found[0].node) if found else None
        self._leaving = [segment for segment in found if stays is None or segment.node != stays[0]]
        if not self._leaving:
            self._finish({})
        elif stays is None:
            self._read()
        else:
            self._move(*stays)

    def _move(self, node: str, agent: ActorHandle) -> None:
        wants = [
            Want(segment.path, segment.num_bytes, segment.node, self._held.agent_on(segment), [(0, segment.num_bytes)])
            for segment in self._leaving
        ]

        def moved(has_room: bool) -> None:
            if not has_room:
                self._read()
                return
            copies = {
                segment.path: replace(segment, path=place_on(node, segment.path, segment.node), node=node)
                for segment in self._leaving
            }
            self._finish({path: copy.freed_with() for path, copy in copies.items()})

        self._then(future_of(agent.take_over.remote(wants)), moved)

    def _read(self) -> None:
        files = [(segment.path, segment.node, segment.num_bytes) for segment in self._leaving]

        def read(contents: list[Any]) -> None:
            values = zip(self._leaving, contents, strict=True)
            self._finish({own.path: torch.from_numpy(x.copy()).view(own.dtype).view(own.shape) for own, x in values})

        self._then(future_of(self._held.agent_on(self._leaving[0]).take_held.remote(files)), read)

    def _finish(self, kept: dict[str, Part]) -> None:
        self.kept.set_result(
            answer_of(self._reply, self._held, lambda own: kept[own.path] if own.path in kept else own.freed_with())
        )


class CopiesHere:
    """The copies on an agent's node of rows that other nodes hold."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._copied: defaultdict[str, set[Range]] = defaultdict(set)
        self._copying = asyncio.Lock()

    async def fetch(self, wants: Sequence[Want]) -> None:
        """Copy what is not here yet, of all segments at once. Raises ProcessDied where a node or a file is gone."""
        async with self._copying:
            await asyncio.gather(*(self._fetch(want) for want in wants))

    async def take_over(self, wants: Sequence[Want]) -> bool:
        """Move whole segments to this node; returns whether it has room, else they stay. Raises as `fetch`."""
        room = shutil.disk_usage(SEGMENTS)
        if room.free - sum(want.size for want in wants) < LEFT_FREE * room.total:
            return False
        await self.fetch(wants)
        for want in wants:
            self._copied.pop(want.path, None)
            want.agent.free_held.remote([(want.path, want.owner)])
        return True

    async def _fetch(self, want: Want) -> None:
        missing = [each for each in dict.fromkeys(want.ranges) if each not in self._copied[want.path]]
        if not missing:
            return
        try:
            content = await want.agent.read_held.remote(want.path, missing)
        except RayError as error:
            raise ProcessDied(f"a remote column of node {want.owner} is gone: {error}") from None
        parts, place = [], 0
        for start, stop in missing:
            parts.append((start, content[place : place + stop - start]))
            place += stop - start
        await asyncio.to_thread(write, place_on(self._node, want.path, want.owner), parts, want.size)
        self._copied[want.path] |= set(missing)

    def free(self, paths: Sequence[tuple[str, str]]) -> None:
        """Remove files and copies: (path, owner)."""
        for path, owner in paths:
            self._copied.pop(path, None)
            Path(place_on(self._node, path, owner)).unlink(missing_ok=True)
