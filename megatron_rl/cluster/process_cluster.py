"""The pools of a run as processes, on one machine or many: reserve places for all ranks, start them, end them.

A pool is started as a whole, or cut into replicas, of which each may fail and be started again alone. An elastic pool's
replicas have a place each, and need not all have one.
"""

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
"""Longest wait for the places of the fewest replicas that a run needs."""
OTHERS_S = 1.0
"""Longest wait for the places of further replicas, which may join later."""


class ProcessCluster:
    """All pools of a run. Entering starts their processes; leaving ends them. Raises as its launcher and `ProcessPool`.

    pools: name -> a pool whose failure ends all pools. replicated: name -> a pool that is cut into replicas; the
    failure of one ends this replica alone.
    """

    def __init__(
        self,
        launcher: AbstractContextManager[Launcher],
        specs: Sequence[PoolSpec],
        hosting: Hosting,
        check: Callable[[Mapping[str, Ranks]], None] | None = None,
    ) -> None:
        """check: called with the places of all ranks before a process is started. Raises ValueError where a pool to
        replicate does not exist.
        """
        if unknown := hosting.replicated.keys() - {spec.name for spec in specs}:
            raise ValueError(f"there are no pools {sorted(unknown)} to replicate")
        self.pools: dict[str, ProcessPool] = {}
        self.replicated: dict[str, ReplicatedPool] = {}
        self._launcher, self._specs, self._hosting, self._check = launcher, specs, hosting, check
        self._started = ExitStack()

    def at_work(self) -> list[str]:
        texts = [(name, at_work(pool)) for name, pool in self.pools.items()]
        texts += [(name, pool.at_work()) for name, pool in self.replicated.items()]
        texts = [(name, text) for name, text in texts if text]
        return [text if len(texts) == 1 else f"{name}: {text}" for name, text in texts]

    def __enter__(self) -> Self:
        with ExitStack() as started:  # ends everything if the start fails
            launcher = started.enter_context(self._launcher)
            ranks, replicas = self._reserve(launcher, started)
            if self._check is not None:
                self._check(ranks | self._elastic_places(replicas))
            # Every process learns where all others run; replicas read the list again when they are started again.
            processes: list[ProcessInfo] = []
            failure_domain = FailureDomain(named=len(self._specs) > 1)
            for spec in self._specs:
                if spec.name in replicas:
                    self._spawn_replicas(spec, replicas[spec.name], failure_domain, processes, started)
                else:
                    self.pools[spec.name] = pool = self._pool(spec, spec.name, ranks[spec.name], failure_domain)
                    started.push(pool)
                    pool.spawn()
            by_name: dict[str, ProcessPool | ReplicatedPool] = {**self.pools, **self.replicated}
            processes += [process for spec in self._specs for process in by_name[spec.name].wait_for_processes()]
            beginning: list[PoolFuture[None]] = [pool.begin(processes) for pool in self.pools.values()]
            beginning += [future for pool in self.replicated.values() for future in pool.begin()]
            with self._hosting.observer.waiting("init"):
                get_all(beginning)
            self._started = started.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._started.__exit__(kind, error, trace)
            return
        with self._started:
            for pool in self.pools.values():  # before any pool is shut down
                pool.settle()

    def _reserve(
        self, launcher: Launcher, started: ExitStack
    ) -> tuple[dict[str, Ranks], dict[str, list[ReplicaRanks]]]:
        """Reserve places until `started` is closed. Returns those of pools that are not elastic, and the replicas of
        pools that are cut, by the pools' names.
        """
        elastic = self._hosting.elastic
        ranks = reserve_all(launcher, [spec for spec in self._specs if spec.name not in elastic], started)
        replicas = {name: ask_for_replicas(name, pool, launcher, started) for name, pool in elastic.items()}
        for name, size in self._hosting.replicated.items():
            if name not in elastic:
                replicas[name] = parts_of(name, ranks[name], size)
        return ranks, replicas

    def _elastic_places(self, replicas: Mapping[str, Sequence[ReplicaRanks]]) -> dict[str, Ranks]:
        """Return the places that replicas of elastic pools have now, as POOL/NUMBER."""
        of_elastic = ((name, replica) for name in self._hosting.elastic for replica in replicas[name])
        return {f"{name}/{replica.number}": replica for name, replica in of_elastic if replica.is_given}

    def _spawn_replicas(
        self,
        spec: PoolSpec,
        replicas: Sequence[ReplicaRanks],
        failure_domain: FailureDomain,
        processes: list[ProcessInfo],
        started: ExitStack,
    ) -> None:
        """Start the processes of a pool's replicas, which end with the other pools. processes: see `ReplicatedPool`."""

        def make_pool(name: str, ranks: Ranks, domain_of_replica: FailureDomain) -> ProcessPool:
            return self._pool(spec, name, ranks, domain_of_replica)

        pool = ReplicatedPool(spec.name, replicas, make_pool, processes)
        self.replicated[spec.name] = pool
        started.callback(pool.end)
        failure_domain.on_end.append(pool.end)
        pool.spawn()

    def _pool(self, spec: PoolSpec, name: str, ranks: Ranks, failure_domain: FailureDomain) -> ProcessPool:
        """Return the pool, or one of its replicas, without processes. name: the pool's or the replica's."""
        hosting, limits = self._hosting, self._hosting.limits
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


def reserve_all(launcher: Launcher, specs: Sequence[PoolSpec], started: ExitStack) -> dict[str, Ranks]:
    """Reserve places for the ranks of all pools at an entered launcher, until `started` is closed.

    Raises ConfigError where the cluster has no room for all of them: no process is started before.
    """
    others = {spec.name: [other.size for other in specs if other is not spec] for spec in specs}
    reserved = {spec.name: launcher.reserve(spec.size, others[spec.name]) for spec in specs}
    return {name: started.enter_context(ranks) for name, ranks in reserved.items()}


def ask_for_replicas(name: str, pool: ElasticPool, launcher: Launcher, started: ExitStack) -> list[ReplicaRanks]:
    """Ask for a place for every replica of an elastic pool, until `started` is closed; wait for the fewest that a run
    needs, and OTHERS_S for the others.

    Raises ConfigError where the fewest have no places after ROOM_LIMIT_S.
    """
    most, replicas = pool.max_replicas, []
    for number in range(most):
        ranks = launcher.ask(pool.replica)
        started.callback(ranks.give_back)
        full_name, size = f"{name}/{number}", ranks.world_size
        replicas.append(ReplicaRanks(full_name, ranks, number, size, place=0, num_replicas=most, drains=True))
    asked = time.monotonic()
    while (num_given := sum(replica.is_given for replica in replicas)) < most:
        waited_s = time.monotonic() - asked
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
    return replicas


def stacks_file(file: Path, pool: str) -> Path:
    """Return the stacks file of one of several pools: each pool and each replica writes its own."""
    return file.with_name(f"{file.stem}_{pool.replace('/', '_')}{file.suffix}")
