"""One rank with all roles in this process: calls run where they are made, and a debugger sees everything."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from megatron_rl.cluster.handle import HOST, Handle, Target, all_targets
from megatron_rl.cluster.pool_options import Hosting, phases_of
from megatron_rl.cluster.ranks import LOOPBACK
from megatron_rl.cluster.routing import Split, join_answers
from megatron_rl.config.roles import PoolSpec
from megatron_rl.dispatch import CallInterval, Dispatch, Future
from megatron_rl.observe.liveness import current_work

if TYPE_CHECKING:
    from megatron_rl.cluster.replicas import ReplicatedPool

Kind = TypeVar("Kind")


class InProcessPool:
    """The only rank of the only pool. Calls return when the method has returned, and raise what it raises."""

    def __init__(self, spec: PoolSpec, hosting: Hosting) -> None:
        self.name = spec.name
        self._hosting = hosting
        self._host: Any = hosting.host_class(*hosting.args, spec.name)
        self._method = ""
        self._targets = all_targets(hosting.host_class, hosting.kinds_in(spec), phases_of(spec))

    def handle(self, role: str, kind: type[Kind]) -> Kind:
        return cast(Kind, Handle(kind, self._targets[role], self._call))

    def host(self, kind: type[Kind]) -> Kind:
        return self.handle(HOST, kind)

    def raise_if_failed(self) -> None:
        """Do nothing: a failing call raises."""

    def at_work(self) -> str:
        """Return which method runs and how far it is; "" where none does."""
        work = current_work()
        return self._method if work is None or not self._method else f"{self._method}, {work}"

    def _call(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        observer = self._hosting.observer
        observer.before(target.mark)
        start = time.time()
        self._method = f"{target.who}.{target.method}"
        try:
            with observer.waiting(target.phase):
                answer = self._body(target)(*args, **kwargs)
        finally:
            self._method = ""
        stop = time.time()
        observer.ran(CallInterval(self.name, target.role, target.method, target.phase, start, stop, stop - start))
        match target.mark.dispatch:
            case Dispatch.DP:
                return Future.done(join_answers([answer], Split([(args, kwargs)])))
            case Dispatch.ONE_TO_ALL | Dispatch.REPLICAS:
                return Future.done([answer])
        return Future.done(answer)

    def _body(self, target: Target) -> Callable[..., Any]:
        if target.role == HOST:
            body: Callable[..., Any] = getattr(self._host, target.method)
            return body
        return lambda *args, **kwargs: self._host.run(target.role, target.method, args, kwargs)


class InProcessCluster:
    """A cluster of one pool of one rank: this process. Raises ValueError for more ranks, pools or replicas."""

    def __init__(self, specs: Mapping[str, PoolSpec], hosting: Hosting) -> None:
        if [spec.world_size for spec in specs.values()] != [1]:
            sizes = {name: spec.world_size for name, spec in specs.items()}
            raise ValueError(f"one pool of one rank runs in this process, not {sizes}")
        if hosting.replicated:
            raise ValueError(f"no pool in this process can be replicated, and {sorted(hosting.replicated)} is to be")
        (self._spec,) = specs.values()
        self._hosting = hosting
        self.pools: dict[str, InProcessPool] = {}
        self.replicated: dict[str, ReplicatedPool] = {}

    def at_work(self) -> list[str]:
        return [text for pool in self.pools.values() if (text := pool.at_work())]

    def __enter__(self) -> Self:
        # vLLM reads these even where torch.distributed was initialised without them.
        place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0"}
        place |= {"NODE_ADDRESS": LOOPBACK, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": "0"}
        os.environ |= {**self._hosting.env, **place}
        self.pools[self._spec.name] = InProcessPool(self._spec, self._hosting)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: the process ends with the run."""
