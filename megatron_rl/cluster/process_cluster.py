"""Pools of processes, on one machine or many. The failure of a rank ends all pools or its replica."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron_rl.cluster.failures import FailureDomain
from megatron_rl.cluster.launcher import Launcher, ProcessInfo, Ranks
from megatron_rl.cluster.pool import ProcessPool, at_work
from megatron_rl.cluster.pool_options import Hosting, phases_of
from megatron_rl.cluster.ranks import ReplicaRanks
from megatron_rl.cluster.replicas import ReplicatedPool, parts_of
from megatron_rl.cluster.waiting import PoolFuture, get_all
from megatron_rl.config.roles import ElasticPool, PoolSpec
from megatron_rl.errors import ConfigError

ROOM_LIMIT_S = 30.0
"""Seconds for the cluster to have room for the fewest replicas that a run needs."""
OTHERS_S = 1.0
"""Seconds that a start waits for the places of further replicas."""


class ProcessCluster:
    """All pools of a run, started together by a launcher. Raises its errors and those of `ProcessPool`.

    pools, replicated: by name. A failure in one of `pools` ends all pools; a failure in a replica ends that replica.
    check: called with the reserved ranks of every pool before the first process of a pool is started.
    """

    def __init__(
        self,
        launcher: AbstractContextManager[Launcher],
        specs: Sequence[PoolSpec],
        hosting: Hosting,
        check: Callable[[Mapping[str, Ranks]], None] | None = None,
    ) -> None:
        """Raises ValueError when a pool to replicate does not exist."""
        if unknown := hosting.replicated.keys() - {spec.name for spec in specs}:
            raise ValueError(f"there are no pools {sorted(unknown)} to replicate")
        self.pools: dict[str, ProcessPool] = {}
        self.replicated: dict[str, ReplicatedPool] = {}
        self._launcher, self._specs, self._hosting, self._check = launcher, specs, hosting, check
        self._open = ExitStack()

    def at_work(self) -> list[str]:
        texts = [(name, at_work(pool)) for name, pool in self.pools.items()]
        texts += [(name, pool.at_work()) for name, pool in self.replicated.items()]
        texts = [(name, text) for name, text in texts if text]
        return [text if len(texts) == 1 else f"{name}: {text}" for name, text in texts]

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            launcher = opened.enter_context(self._launcher)
            failure_domain, numbered = FailureDomain(named=len(self._specs) > 1), list[ProcessInfo]()
            elastic = self._hosting.elastic
            ranks = reserve_all(launcher, [spec for spec in self._specs if spec.name not in elastic], opened)
            parts = {name: ask_for_replicas(name, pool, launcher, opened) for name, pool in elastic.items()}
            parts |= {
                name: parts_of(name, ranks[name], size)
                for name, size in self._hosting.replicated.items()
                if name not in elastic
            }
            if self._check is not None:
                given = {f"{name}/{part.number}": part for name in elastic for part in parts[name] if part.is_given}
                self._check({**ranks, **given})
            for spec in self._specs:
                if spec.name in self._hosting.replicated:
                    self._replicate(spec, parts[spec.name], failure_domain, numbered, opened)
                else:
                    self.pools[spec.name] = pool = self._pool(spec, spec.name, ranks[spec.name], failure_domain)
                    opened.push(pool)
                    pool.spawn()
            spawned: dict[str, ProcessPool | ReplicatedPool] = {**self.pools, **self.replicated}
            numbered += [process for spec in self._specs for process in spawned[spec.name].wait_for_processes()]
            starts: list[PoolFuture[None]] = [pool.begin(numbered) for pool in self.pools.values()]
            starts += [start for pool in self.replicated.values() for start in pool.begin()]
            with self._hosting.observer.waiting("init"):
                get_all(starts)
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._open.__exit__(kind, error, trace)
            return
        with self._open:
            for pool in self.pools.values():  # before any pool is shut down
                pool.settle()

    def _replicate(
        self,
        spec: PoolSpec,
        parts: Sequence[ReplicaRanks],
        failure_domain: FailureDomain,
        numbered: list[ProcessInfo],
        opened: ExitStack,
    ) -> None:
        def make(name: str, part: Ranks, own: FailureDomain) -> ProcessPool:
            return self._pool(spec, name, part, own)

        pool = ReplicatedPool(spec.name, parts, make, numbered)
        self.replicated[spec.name] = pool
        opened.callback(pool.end)
        failure_domain.on_end.append(pool.end)
        pool.spawn()

    def _pool(self, spec: PoolSpec, name: str, ranks: Ranks, failure_domain: FailureDomain) -> ProcessPool:
        """name: the pool's, or its replica's."""
        hosting = self._hosting
        limits = hosting.limits
        if limits.stacks_file is not None and (len(self._specs) > 1 or name != spec.name):
            limits = replace(limits, stacks_file=stacks_file(limits.stacks_file, name))
        observer = hosting.observer if name == spec.name else hosting.replica_observer
        return ProcessPool(
            name,
            ranks,
            hosting.host_class,
            *hosting.args,
            spec.name,
            roles=hosting.kinds_in(spec),
            options=replace(hosting, limits=limits, phases=phases_of(spec), observer=observer),
            failure_domain=failure_domain,
        )


def reserve_all(launcher: Launcher, specs: Sequence[PoolSpec], opened: ExitStack) -> dict[str, Ranks]:
    """Reserve the ranks of all pools at an entered launcher, until `opened` is closed. Raises ConfigError.

    The cluster must have room for all pools before a process starts.
    """
    others = {spec.name: [other.size for other in specs if other is not spec] for spec in specs}
    reserved = {spec.name: launcher.reserve(spec.size, others[spec.name]) for spec in specs}
    return {name: opened.enter_context(places) for name, places in reserved.items()}


def ask_for_replicas(name: str, pool: ElasticPool, launcher: Launcher, opened: ExitStack) -> list[ReplicaRanks]:
    """Ask for the places of all replicas, each its own, until `opened` is closed; wait for the fewest that are needed.

    Raises ConfigError where these do not exist after ROOM_LIMIT_S.
    """
    parts = []
    for number in range(pool.max_replicas):
        ranks = launcher.ask(pool.replica)
        opened.callback(ranks.give_back)
        size, names = ranks.world_size, f"{name}/{number}"
        parts.append(ReplicaRanks(names, ranks, number, size, place=0, num_replicas=pool.max_replicas, drains=True))
    started = time.monotonic()
    while (num_given := sum(part.is_given for part in parts)) < pool.max_replicas:
        waited_s = time.monotonic() - started
        if num_given >= pool.min_replicas and waited_s > OTHERS_S:
            break
        if waited_s > ROOM_LIMIT_S:
            raise ConfigError(
                f"actor_rollout_ref.rollout.min_replicas={pool.min_replicas} x {pool.replica.world_size} rank(s), and "
                f"the cluster has room for {num_given} replica(s) in addition to the other pools after "
                f"{ROOM_LIMIT_S:g} s; "
                f"try: min_replicas={max(1, num_given)}, or more nodes (`ray start --address=...` on each)",
                is_shortage=True,
            )
        time.sleep(0.1)
    return parts


def stacks_file(file: Path, pool: str) -> Path:
    """Return the stacks file of one of several pools: each pool and each replica writes its own."""
    return file.with_name(f"{file.stem}_{pool.replace('/', '_')}{file.suffix}")
