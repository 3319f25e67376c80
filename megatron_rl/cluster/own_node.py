"""Ranks where Ray has no other node than the driver's: the run's supervisor starts them, and pipes carry the calls.

The agent of the reservation holds its GPUs for Ray, and names them; no call passes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.actor import ActorHandle

from megatron_rl.cluster.agent_route import Shared
from megatron_rl.cluster.ray_remote_columns import future_of, read_future
from megatron_rl.cluster.ray_session import RaySession
from megatron_rl.cluster.supervisor_client import PIPES, READ_HERE, LocalRankProcess


class OwnNodeRoute:
    """Starts a reservation's ranks here and sends them messages. has_gpus: each gets one of the agent's.

    lost: called when the agent is gone; its ranks, whose place Ray may then give to others, are killed.
    """

    def __init__(self, agent: ActorHandle, session: RaySession, has_gpus: bool, lost: Callable[[], None]) -> None:
        self.agent, self._session, self._lost = agent, session, lost
        self._gpus: Future[list[str]] | None = future_of(agent.gpus.remote()) if has_gpus else None
        self._processes: list[LocalRankProcess] = []
        future_of(agent.until_lost.remote()).add_done_callback(self._end)

    def start(self, local_rank: int, variables: dict[str, str]) -> LocalRankProcess:
        """Start a rank, and do not wait; local_rank: the index of its GPU. Raises as `SupervisorClient.start`."""
        session, host = self._session, ray.util.get_node_ip_address()
        session.note_node(session.node_id)
        if self._gpus is None:
            process = session.supervision.start(variables, session.node_id, host)
        else:
            gpu = read_future(self._gpus, lambda gpus: gpus[local_rank])
            process = session.supervision.start_with(gpu, variables, session.node_id, host, READ_HERE)
        process.route = self
        self._processes = [*(each for each in self._processes if not each.ended.done()), process]
        return process

    def send(self, messages: Sequence[tuple[LocalRankProcess, Any]]) -> list[Future[Any]]:
        """Write the messages to the pipes."""
        contents = ((each, sent.message if isinstance(sent, Shared) else sent) for each, sent in messages)
        return PIPES.send([*contents])

    def end(self, reason: str = "") -> None:
        """Kill the ranks; reason: what failed calls say of it."""
        for process in self._processes:
            process.kill(reason)

    def _end(self, done: Future[Any]) -> None:
        """End the ranks after the agent."""
        self._lost()
        self.end(str(done.exception()))
