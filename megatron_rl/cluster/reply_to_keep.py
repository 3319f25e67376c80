"""A reply of ranks that the run may lose: its remote columns move to a node that stays, before the reply counts.

    reply of a replica --which segments--> a lasting node's agent copies the files --> the reply names the copies

A run continues without a replica and trains on all that it has answered. A node that is lost before the copies exist is
lost without its reply.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from ray import ObjectRef
from ray.actor import ActorHandle

from megatron_rl.cluster.rank_messages import answer_of
from megatron_rl.cluster.ray_remote_columns import RayRemoteColumns, Want
from megatron_rl.cluster.shm_files import place_on
from megatron_rl.remote_columns import Part, RemoteSegment


class ReplyToKeep:
    """A reply on its way. kept: its content, once its columns are on a node that stays.

    Where that has no room, or there is none, the columns pass through the driver.
    """

    def __init__(
        self, reply: Future[bytes], held: RayRemoteColumns, future_of: Callable[[ObjectRef], Future[Any]]
    ) -> None:
        """future_of: returns the future of a call of an agent."""
        self.kept: Future[Any] = Future()
        self._held, self._future_of = held, future_of
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

        self._then(self._future_of(agent.take_over.remote(wants)), moved)

    def _read(self) -> None:
        files = [(segment.path, segment.node, segment.num_bytes) for segment in self._leaving]

        def read(contents: list[Any]) -> None:
            values = zip(self._leaving, contents, strict=True)
            self._finish({own.path: torch.from_numpy(x.copy()).view(own.dtype).view(own.shape) for own, x in values})

        self._then(self._future_of(self._held.agent_on(self._leaving[0]).take_held.remote(files)), read)

    def _finish(self, kept: dict[str, Part]) -> None:
        self.kept.set_result(
            answer_of(self._reply, self._held, lambda own: kept[own.path] if own.path in kept else own.freed_with())
        )
