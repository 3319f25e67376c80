"""What the ranks of a pool are doing, by their last signs of life."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from megatron_rl.cluster.handle import HOST, Target
from megatron_rl.cluster.heartbeat_monitor import HeartbeatMonitor
from megatron_rl.cluster.routing import Route
from megatron_rl.dispatch import Dispatch
from megatron_rl.observe.liveness import WorkDone


class PoolAtWork(Protocol):
    """A pool, its routes, and what hears its ranks once they are up."""

    @property
    def monitor(self) -> HeartbeatMonitor | None: ...

    @property
    def routes(self) -> Mapping[Dispatch, Route]: ...

    @property
    def all_targets(self) -> Mapping[str, Mapping[str, Target]]: ...


def at_work(pool: PoolAtWork) -> str:
    """Return which method ranks are in and how far it is; "" where they are in none. Any thread may ask.

    Work is added up over the ranks that answer for their replica: the others of a replica do the same.
    """
    signs = {} if pool.monitor is None else {rank: sign for rank, sign in pool.monitor.signs.items() if sign.method}
    if not signs:
        return ""
    (role, method), num_ranks = Counter((sign.role, sign.method) for sign in signs.values()).most_common(1)[0]
    text = f"{role}.{method} on {num_ranks} rank{'s' if num_ranks > 1 else ''}"
    target = pool.all_targets.get(HOST if role == "host" else role, {}).get(method)
    if target is None or target.mark.dispatch not in pool.routes:
        return text
    collectors = pool.routes[target.mark.dispatch].collectors
    here = [sign.work for rank, sign in signs.items() if rank in collectors and sign.method == method]
    works = [work for work in here if work is not None]
    if not works:
        return text
    all_done = WorkDone(works[0].things, sum(work.done for work in works), sum(work.total for work in works))
    return f"{text}, {all_done}"
