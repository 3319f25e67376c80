"""Pools as processes that Ray starts, on one machine or many; the failure of one rank ends them all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron_rl.cluster.cluster import Hosting, phases_of
from megatron_rl.cluster.handle import Fate
from megatron_rl.cluster.ray_pool import PoolOptions, RayPool
from megatron_rl.cluster.ray_session import RaySession
from megatron_rl.cluster.resource_pool import ResourcePool
from megatron_rl.config.roles import PoolSpec


class RayCluster:
    """Every pool of a run, started together. Raises as `RaySession`, `ResourcePool` and `RayPool` do."""

    def __init__(self, specs: Sequence[PoolSpec], hosting: Hosting) -> None:
        self.pools: dict[str, RayPool] = {}
        self._specs, self._hosting = specs, hosting
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            session = opened.enter_context(RaySession(sum(spec.world_size for spec in self._specs)))
            fate = Fate()
            # The cluster must have room for all of them before a process starts.
            ranks = {spec.name: opened.enter_context(self._reserved(spec, session)) for spec in self._specs}
            for spec in self._specs:
                self.pools[spec.name] = pool = self._pool(spec, ranks[spec.name], fate)
                opened.push(pool)
                pool.spawn()
            processes = [process for pool in self.pools.values() for process in pool.wait_for_processes()]
            for pool in self.pools.values():
                pool.start(processes)
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._open.__exit__(kind, error, trace)
            return
        with self._open:
            for pool in self.pools.values():  # before any of them is shut down
                pool.settle()

    def _reserved(self, spec: PoolSpec, session: RaySession) -> ResourcePool:
        size = spec.size
        return ResourcePool(
            size.num_nodes,
            size.num_ranks_per_node,
            self._hosting.device_kind,
            session=session,
            nodes_key=size.nodes_key,
            ranks_key=size.ranks_key,
            beside=[other.size for other in self._specs if other is not spec],
        )

    def _pool(self, spec: PoolSpec, ranks: ResourcePool, fate: Fate) -> RayPool:
        hosting = self._hosting
        limits = hosting.limits
        if limits.stacks_file is not None and len(self._specs) > 1:
            limits = replace(limits, stacks_file=stacks_file(limits.stacks_file, spec.name))
        options = PoolOptions(
            env=hosting.env, work=hosting.work, limits=limits, phases=phases_of(spec), observer=hosting.observer
        )
        return RayPool(
            spec.name,
            ranks,
            hosting.host_class,
            *hosting.args,
            spec.name,
            roles=hosting.kinds_in(spec),
            options=options,
            fate=fate,
        )


def stacks_file(file: Path, pool: str) -> Path:
    """Where the stacks of one of several pools go: each pool is watched, and written, by itself."""
    return file.with_name(f"{file.stem}_{pool}{file.suffix}")
