"""The driver's route to the ranks of a node: one Ray call to their agent for all messages of a call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any

import numpy
import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from megatron_rl.cluster.launcher import ProcessInfo
from megatron_rl.cluster.node_agent import FIRST_LOOK_S, LAST_LOOK_S, Answers, ToRank
from megatron_rl.cluster.rank_messages import ProcessDied, answer_of
from megatron_rl.cluster.ray_remote_columns import ReplyToKeep, Wanted, future_of, read_future
from megatron_rl.cluster.ray_session import RaySession
from megatron_rl.cluster.stale_processes import REPLICA

INLINE_BYTES = 64 << 10
"""Messages up to this size are sent inside the calls; larger ones are stored once for all nodes."""


class Shared:
    """A message to ranks, of one node or several, and the rows of remote columns in it."""

    def __init__(self, message: bytes, wanted: Wanted) -> None:
        self.message, self.wanted = message, wanted

    @cached_property
    def stored(self) -> bytes | ObjectRef:
        """The message, or where it is stored."""
        if len(self.message) <= INLINE_BYTES:
            return self.message
        return ray.put(numpy.frombuffer(self.message, numpy.uint8))  # Ray would copy bytes


class AgentRoute:
    """Has an agent start ranks, and sends them messages. lost: called when the agent is gone."""

    def __init__(self, agent: ActorHandle, session: RaySession, lost: Callable[[], None]) -> None:
        self.agent, self.lost, self.session = agent, lost, session
        self._calls, self._keys = itertools.count(), itertools.count()

    def start(self, local_rank: int, variables: dict[str, str]) -> RayRankProcess:
        """Start a rank, and do not wait; local_rank: the index of its GPU."""
        return RayRankProcess(self, next(self._keys), local_rank, variables)

    def end(self) -> None:
        """Do nothing: the ranks end with the agent."""

    def send(self, messages: Sequence[tuple[RayRankProcess, Any]]) -> list[Future[Any]]:
        """Send ranks of the agent a message each; contents that several have in common travel once."""
        places, contents, parts = dict[int, int](), list[bytes | ObjectRef](), list[ToRank]()
        for process, message in messages:
            is_shared = isinstance(message, Shared)
            content, wanted = (message.stored, message.wanted) if is_shared else (message, [])
            wants = self.session.held.wants(wanted, process.info.result().node_id) if wanted else []
            if id(content) not in places:
                places[id(content)] = len(contents)
                contents.append(content)
            parts.append(ToRank(process.key, next(process.numbers), places[id(content)], wants))
        replies = [Future[bytes]() for _ in messages]
        call = next(self._calls)
        self._take(call, self.agent.send.remote(call, parts, *contents), replies, FIRST_LOOK_S)
        return [process.read(reply) for (process, _), reply in zip(messages, replies, strict=True)]

    def _take(self, call: int, answering: ObjectRef, replies: list[Future[bytes]], look_s: float) -> None:
        """Pass replies on as the agent returns them, and ask for those that are missing."""

        def take(done: Future[Answers]) -> None:
            try:
                answers = done.result()
            except Exception as error:
                for reply in replies:
                    if not reply.done():
                        reply.set_exception(error)
                return
            # Without Ray the rest will not come, and a call would start Ray again.
            if sum(not reply.done() for reply in replies) > len(answers) and ray.is_initialized():
                longer = min(LAST_LOOK_S, 2 * look_s)
                self._take(call, self.agent.rest.remote(call, longer), replies, longer)
            for place, answer in answers:
                if isinstance(answer, ProcessDied):
                    replies[place].set_exception(answer)
                else:
                    replies[place].set_result(answer)

        future_of(answering, lost=self.lost).add_done_callback(take)


class RayRankProcess:
    """A rank that an agent has started (see `launcher.RankProcess`). key: its name; numbers: counts its messages."""

    def __init__(self, route: AgentRoute, key: int, local_rank: int, variables: dict[str, str]) -> None:
        self.route, self.key, self._session = route, key, route.session
        self._may_be_lost = REPLICA in variables
        self.numbers: Iterator[int] = itertools.count()
        agent = route.agent
        self.info: Future[ProcessInfo] = future_of(agent.start.remote(key, local_rank, variables), self._describe)
        self.ended: Future[str] = Future()
        ended = future_of(agent.end_of.remote(key), lost=route.lost)
        ended.add_done_callback(lambda done: self.ended.set_result(str(done.exception() or done.result())))

    def read(self, reply: Future[bytes]) -> Future[Any]:
        """Return the future of the content of this rank's reply."""
        held = self._session.held
        if self._may_be_lost:
            return ReplyToKeep(reply, held).kept
        return read_future(reply, partial(answer_of, files=held))

    def _describe(self, process: ProcessInfo) -> ProcessInfo:
        self._session.held.note(process.node_id, self.route.agent, lasts=not self._may_be_lost)
        return self._session.describe(process)

    def kill(self) -> None:
        # Without Ray it is gone, and a call would start Ray again, or wait for a server that is gone.
        if ray.is_initialized() and not self._session.is_lost:
            self.route.agent.kill.remote(self.key)
