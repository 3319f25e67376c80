"""The launcher's interface: it reserves places for ranks and starts a process on each.

Two launchers have it: `LocalLauncher` starts the ranks of one machine, `RayLauncher` those of a cluster. Pools, calls,
failures, heartbeats, replicas and ends above it are the same for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_rl.cluster.scratch import Scratch
from megatron_rl.config.roles import PoolSize
from megatron_rl.remote_columns import RemoteColumn

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class ProcessInfo:
    """Where a rank's process runs. gpus: the GPUs that it sees, in the form of VISIBLE_GPUS.

    is_local: it runs on the node of the driver.
    """

    pid: int
    node_id: str
    host: str
    gpus: str = ""
    is_local: bool = True

    @property
    def where(self) -> str:
        """The process's name in messages."""
        return f"process {self.pid} on node {self.host}"


class RankProcess(Protocol):
    """The driver's end of one rank's process. Its methods return at once.

    info: where it runs, once it is up. ended: how it has ended, once it has. Both raise ProcessDied where the process
    could not be started. route: processes with an equal one are sent messages together (`send_together`).
    """

    info: Future[ProcessInfo]
    ended: Future[str]

    @property
    def route(self) -> Way: ...

    def kill(self) -> None:
        """Kill it and all processes of its group. Does nothing where it has ended."""


class Way(Protocol):
    """A way to processes; its method returns at once."""

    def send(self, messages: Sequence[tuple[Any, Any]]) -> list[Future[Any]]:
        """Send processes of this route a message each, see `send_together`."""


def send_together(messages: Sequence[tuple[RankProcess, Any]]) -> list[Future[Any]]:
    """Send processes a message each, in one go on every route.

    A message is bytes, or a result of `Ranks.share`. The futures are in the order of the messages; each has the rank's
    reply, or raises RankFailed or ProcessDied.
    """
    by_route: defaultdict[Way, list[int]] = defaultdict(list)
    for place, (process, _) in enumerate(messages):
        by_route[process.route].append(place)
    answers: dict[int, Future[Any]] = {}
    for route, places in by_route.items():
        answers.update(zip(places, route.send([messages[place] for place in places]), strict=True))
    return [answers[place] for place in range(len(messages))]


class Ranks(ABC):
    """Reserved ranks, numbered from 0 in the world that they form.

    num_ranks_per_node: consecutive ranks that are sure to be on one node. first: number of rank 0 in the reservation,
    which has `node_size` ranks on each node.
    """

    def __init__(self, world_size: int, num_ranks_per_node: int, first: int, node_size: int) -> None:
        self.world_size, self.num_ranks_per_node = world_size, num_ranks_per_node
        self.first, self._node_size = first, node_size

    def local_rank(self, rank: int) -> int:
        """Index of a rank among the ranks of this world on its node."""
        return rank - self._on_node(rank).start

    def local_world_size(self, rank: int) -> int:
        """Number of ranks of this world on the node of `rank`."""
        return len(self._on_node(rank))

    @abstractmethod
    def device_index(self, rank: int) -> int:
        """Index of a rank's device among the devices that its process sees."""

    @abstractmethod
    def start(self, rank: int, variables: Mapping[str, str]) -> RankProcess:
        """Start a process on the reserved place of `rank`, with these environment variables; do not wait for it."""

    @abstractmethod
    def share(self, message: bytes, held: Sequence[RemoteColumn] = ()) -> Any:
        """Return a message to several ranks in the form that `send_together` takes. held: the held columns in it."""

    @property
    @abstractmethod
    def address(self) -> str:
        """The address of the driver's node for processes of other nodes."""

    @property
    @abstractmethod
    def is_lost(self) -> bool:
        """Whether the launcher itself is gone, so that no call into it would return."""

    @property
    @abstractmethod
    def run_id(self) -> str:
        """The run that marks every process."""

    @abstractmethod
    def ask(self) -> None:
        """Ask for the places again after `give_back`; do not wait (`is_given`)."""

    @property
    @abstractmethod
    def is_given(self) -> bool:
        """Whether the places are there. Only those of `Launcher.ask` may not be."""

    @abstractmethod
    def give_back(self) -> None:
        """Give places that were asked for back, once their processes have ended."""

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of every rank, on every machine."""
        return {}

    def _on_node(self, rank: int) -> range:
        start = (self.first + rank) // self._node_size * self._node_size - self.first
        return range(max(0, start), min(self.world_size, start + self._node_size))


class Launcher(AbstractContextManager["Launcher"], Protocol):
    """When it is left, no process of the run is left on this machine.

    scratch: the run's folder on this machine. is_lost: the launcher itself is gone, and starts no more ranks. may_grow:
    what is missing now may come later, such as a node.
    """

    may_grow: bool

    @property
    def scratch(self) -> Scratch: ...

    @property
    def is_lost(self) -> bool: ...

    def shortage(self, sizes: Sequence[PoolSize]) -> str:
        """Return a message when living nodes have no room for pools of these sizes, were they empty, else ""."""

    def leave_out(self, node: str, gpu: str) -> None:
        """Give a GPU to no rank from now on; node, gpu: as in `ProcessInfo`. The run's ranks must have ended."""

    def take_back(self) -> None:
        """Give ranks the GPUs again that were left out."""

    def hold_nodes(self) -> None:
        """Keep the run's segments on every node that had ranks until the launcher is left, also without ranks."""

    def segments(self) -> dict[str, list[str]]:
        """Return node -> names of the run's segments there, without their prefix; of living nodes that are held."""

    def reserve(self, size: PoolSize, others: Sequence[PoolSize]) -> AbstractContextManager[Ranks]:
        """Reserve places; others: pools that will be reserved too and must also have room. Raises ConfigError."""

    def ask(self, size: PoolSize) -> Ranks:
        """Ask for places that the cluster may not have yet, and do not wait; the caller gives them back.

        Raises ConfigError where they can never be there.
        """
