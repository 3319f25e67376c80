"""How the hosts of pools run, and on which classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.cluster.heartbeat import HeartbeatLimits
from megatron_rl.config.roles import ElasticPool, PoolSpec
from megatron_rl.dispatch import NullObserver, Observer
from megatron_rl.parallel.balance import SequenceWork


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """How a pool runs on its ranks.

    env: variables of every rank. work: balances the rows of balanced methods between data-parallel ranks; None: rows
    keep their order. limits: when a rank counts as hung. phases: role -> the phases that "score" and "update" stand for
    in the role's methods. grace_s: seconds that the peers of a failed rank have to report before all processes are
    killed. sees_node: a rank sees the GPUs of its world's other ranks on its node (`ranks.gpu_variables`).
    """

    env: Mapping[str, str] = field(default_factory=dict)
    work: SequenceWork | None = None
    limits: HeartbeatLimits = HeartbeatLimits()
    phases: Mapping[str, dict[str, str]] = field(default_factory=dict)
    observer: Observer = NullObserver()
    grace_s: float = 3.0
    sees_node: bool = False


@dataclass(frozen=True)
class Hosting(PoolOptions):
    """The classes on every rank of every pool, with the options of all pools.

    host_class(*args, pool_name): one rank's host (see `ProcessPool`). kinds: role -> its class. device_kind: "cpu" or
    "cuda". replicated: pool name -> number of ranks of each of its replicas (see `replicas`). elastic: of these, the
    pools whose replicas join and leave. replica_observer: hears the calls of replicas, in the thread that makes them.
    """

    host_class: type
    args: tuple[Any, ...]
    kinds: Mapping[str, type]
    device_kind: str
    replicated: Mapping[str, int] = field(default_factory=dict)
    elastic: Mapping[str, ElasticPool] = field(default_factory=dict)
    replica_observer: Observer = NullObserver()

    def kinds_in(self, pool: PoolSpec) -> dict[str, type]:
        """Return the classes of a pool's roles."""
        return {role.name: self.kinds[role.name] for role in pool.roles}


def phases_of(pool: PoolSpec) -> dict[str, dict[str, str]]:
    """Return role -> the phases that "score" and "update" stand for in its methods."""
    return {role.name: role.phases for role in pool.roles}
