"""Ranks of a Ray that has one node: no call passes their agent, but they end with it."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
import ray
from failing_agent import FailingAgent
from fragile_worker import FragileWorker
from launchers import RAY, SHARED_RAY, make_launcher

from megatron_rl.cluster import ray_launcher
from megatron_rl.cluster.own_node import OwnNodeRoute
from megatron_rl.cluster.pool import ProcessPool
from megatron_rl.config.roles import PoolSize
from megatron_rl.errors import WorkerFailure

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive, pytest.mark.timeout(300)]


def test_ranks_end_with_the_agent_that_holds_their_place() -> None:
    """While a call runs; the next ranks of the reservation have an agent again. Would not catch a held GPU."""
    SHARED_RAY.end()
    with make_launcher(RAY, num_ranks=2) as launcher, launcher.reserve(PoolSize(1, 2)) as ranks:
        with ProcessPool("toys", ranks, FragileWorker) as pool:
            pids, route = pool.pids, ranks._routes[0]
            assert isinstance(route, OwnNodeRoute)
            agent = ray.get(route.agent.__ray_call__.remote(lambda _: os.getpid()))
            assert agent not in pids and psutil.Process(agent).ppid() != os.getpid()
            napping = pool.host(FragileWorker).nap(600)
            os.kill(agent, signal.SIGKILL)
            with pytest.raises(WorkerFailure) as raised:
                napping.get()
            assert raised.value.is_loss and "rank" in str(raised.value)
            assert not any(psutil.pid_exists(pid) for pid in pids)
        with ProcessPool("toys", ranks, FragileWorker) as pool:
            assert ranks._routes[0] is not route
            pool.host(FragileWorker).nap(0).get()


def test_an_agent_that_cannot_be_made_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its ranks start without a wait for it: by its own reason, in the start or in the first calls. Would not
    catch an agent that Ray never begins to make.
    """
    SHARED_RAY.end()
    monkeypatch.setattr(ray_launcher, "NodeAgent", FailingAgent)
    with make_launcher(RAY, num_ranks=2) as launcher, launcher.reserve(PoolSize(1, 2)) as ranks:
        with pytest.raises(WorkerFailure) as raised, ProcessPool("toys", ranks, FragileWorker) as pool:
            pool.host(FragileWorker).nap(600).get()
        assert "no folder can hold this run's sockets" in str(raised.value) and raised.value.is_loss
