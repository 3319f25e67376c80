"""What a cluster is to its user: pools by name, each with the handles of its roles; and how one is described."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from megatron_rl.cluster.heartbeat_monitor import HeartbeatLimits
from megatron_rl.config.roles import PoolSpec
from megatron_rl.dispatch import Nobody, Observer
from megatron_rl.parallel.balance import SequenceWork

if TYPE_CHECKING:
    from megatron_rl.cluster.replicas import ReplicatedPool

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Hosting:
    """What runs on every rank of every pool, and how.

    host_class(*args, pool_name): one rank's host (see `RayPool`). kinds: role -> its class. env: variables of every
    rank. work, limits: as in `PoolOptions`. replicated: pool name -> ranks of each replica that it is cut into
    (see `replicas`). replica_observer: hears what replicas are called, in the thread that calls them. sees_node,
    preload: as in `PoolOptions`.
    """

    host_class: type
    args: tuple[Any, ...]
    kinds: Mapping[str, type]
    device_kind: str
    env: Mapping[str, str] = field(default_factory=dict)
    work: SequenceWork | None = None
    limits: HeartbeatLimits = HeartbeatLimits()
    observer: Observer = Nobody()
    replicated: Mapping[str, int] = field(default_factory=dict)
    replica_observer: Observer = Nobody()
    sees_node: bool = False
    preload: Sequence[str] = ()

    def kinds_in(self, pool: PoolSpec) -> dict[str, type]:
        """The classes of a pool's roles."""
        return {role.name: self.kinds[role.name] for role in pool.roles}


def phases_of(pool: PoolSpec) -> dict[str, dict[str, str]]:
    """Role -> what "score" and "update" stand for in its methods' phases."""
    return {role.name: role.phases for role in pool.roles}


class Pool(Protocol):
    """A named set of ranks with one world."""

    name: str

    def handle(self, role: str, kind: type[Kind]) -> Kind:
        """The handle of one of its roles, whose class is `kind`."""

    def host(self, kind: type[Kind]) -> Kind:
        """The handle of the methods of its hosts."""

    def raise_if_failed(self) -> None:
        """Raise where a rank has failed in a call that nobody waits for."""


class Cluster(Protocol):
    """Where pools live; a context manager round all of them."""

    @property
    def pools(self) -> Mapping[str, Pool]:
        """Those that are not replicated, by name; there are none outside of the `with` block."""

    @property
    def replicated(self) -> Mapping[str, ReplicatedPool]:
        """Those that are cut into replicas, by name."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
