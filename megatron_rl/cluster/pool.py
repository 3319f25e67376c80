"""One process per rank of a pool, called role by role: a method of a role is a method of the role's handle.

    with LocalLauncher("cpu") as launcher, launcher.reserve(PoolSize(1, 4)) as ranks:
        pool = ProcessPool("train", ranks, Host, config, roles={"actor": Actor})
        pool.start()
        actor = pool.handle("actor", Actor)
        log_probs = actor.log_probs(sequences)  # returns at once
        ...
        log_probs.get()                         # waits; raises what went wrong on any rank

A call splits its records into chunks and pickles each once, sends every rank one message, waits for one reply of each
rank and joins the replies of the collectors (the others are empty). A failure on one rank ends the pool, because the
other ranks would wait for that rank in their next collective. A rank that stops answering or makes no progress
(`HeartbeatMonitor`) also ends the pool. A pool that ends takes the pools of its `FailureDomain` with it.

One thread calls a pool, its handles and its futures; another thread may call another pool. Any thread may `shutdown`.
"""

from __future__ import annotations

import threading
import time
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future as RankAnswer
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn, TypeVar, cast

from megatron_rl.cluster.calls import LOOK_S, CallsFailed, RankCalls
from megatron_rl.cluster.failures import FailureDomain, RankFailure
from megatron_rl.cluster.handle import HOST, Handle, Target, all_targets
from megatron_rl.cluster.heartbeat import HeartbeatMonitor
from megatron_rl.cluster.launcher import ProcessInfo, RankProcess, Ranks, send_together
from megatron_rl.cluster.loading import import_path
from megatron_rl.cluster.pool_options import PoolOptions
from megatron_rl.cluster.rank_messages import ProcessDied, dumps, packed
from megatron_rl.cluster.rank_worker import Answered
from megatron_rl.cluster.ranks import LOOPBACK, gpu_variables, node_addresses, place_variables
from megatron_rl.cluster.routing import Route, Split, join_answers, payloads_of_replicas, route_call, split_call
from megatron_rl.cluster.waiting import CallFuture, StartFuture, WaitStep
from megatron_rl.dispatch import CallInterval, Coordinates, Dispatch, Future
from megatron_rl.errors import MegatronRLError, WorkerFailure
from megatron_rl.observe.liveness import WorkDone

START_TIMEOUT_S = 300.0
"""Generous: ranks come up in time unless another pool occupies them or their node is gone."""

CALL_LIMIT_S = 5.0
"""Seconds that a thread may be in a call of the launcher while another thread ends the pool."""

EXIT_TIMEOUT_S = 10.0
"""Longest wait for processes that were killed."""

Kind = TypeVar("Kind")


class Processes:
    """One process on every rank of a pool or replica. started, infos: in rank order, once there are any.

    env: variables of every process, in addition to its place in the world.
    """

    def __init__(self, name: str, ranks: Ranks, env: Mapping[str, str]) -> None:
        self.started: list[RankProcess] = []
        self.infos: list[ProcessInfo] = []
        self._name, self._ranks, self._env = name, ranks, env

    def spawn(self) -> None:
        """Start a process on every rank and do not wait."""
        for rank in range(self._ranks.world_size):
            self.started.append(self._ranks.start(rank, self._variables(rank)))

    def coming_up(self) -> list[RankAnswer[ProcessInfo]]:
        """Return replies that are ready once the processes are up, or have failed to."""
        return [process.info for process in self.started]

    def describe(self) -> list[ProcessInfo]:
        """Return where the processes run; all must be up. Raises ProcessDied."""
        if not self.infos:
            self.infos = [process.info.result() for process in self.started]
        return self.infos

    def kill(self) -> None:
        """Kill all processes and do not wait."""
        for process in self.started:
            process.kill()

    def wait_until_gone(self) -> None:
        """After `kill`: wait until the processes are gone, 10 s at most."""
        if not self._ranks.is_lost:
            wait([process.ended for process in self.started], EXIT_TIMEOUT_S)

    def _variables(self, rank: int) -> dict[str, str]:
        ranks = self._ranks
        return {
            "PYTHONPATH": import_path(),
            **self._env,
            **ranks.variables,
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks.world_size),
            "LOCAL_RANK": str(ranks.device_index(rank)),
            "LOCAL_WORLD_SIZE": str(ranks.local_world_size(rank)),
            "POOL_NAME": self._name,
        }


class ProcessPool:
    """One `host_class(*args)` on every rank; call `start` or use it as a context manager.

    ranks: where the processes run; it must have been entered. host_class must have the ONE_TO_ALL method
    `coordinates()`, which returns `dispatch.Coordinates`, and, with `roles` (name -> class), the method
    `run(role, method, args, kwargs)`. Before their class is imported, hosts have RANK, WORLD_SIZE, LOCAL_RANK (the
    index of their device among those they see), LOCAL_WORLD_SIZE and `ranks.place_variables` in their environment, and
    the driver's import path. They meet in the file MASTER_STORE, or, on several nodes, at a socket that listens at
    MASTER_ADDR and MASTER_PORT: rank 0 has it as MASTER_LISTEN_FD, and must take it over (`roles/rendezvous.py`).

    processes: of the ranks. monitor: hears their signs of life, once they are up. all_targets: the methods that
    handles call, by role and name. routes: which ranks are called, and which answer.

    Raises TypeError for a host class without `coordinates`.
    """

    def __init__(
        self,
        name: str,
        ranks: Ranks,
        host_class: type,
        *args: Any,
        roles: Mapping[str, type] | None = None,
        options: PoolOptions | None = None,
        failure_domain: FailureDomain | None = None,
    ) -> None:
        self.name = name
        self._ranks = ranks
        self._host_class, self._args = host_class, args
        self._options = options or PoolOptions()
        self.all_targets = all_targets(host_class, roles or {}, self._options.phases)
        coordinates = self.all_targets[HOST].get("coordinates")
        if coordinates is None or coordinates.mark.dispatch is not Dispatch.ONE_TO_ALL:
            raise TypeError(f"{host_class.__name__} must have a ONE_TO_ALL method `coordinates`")
        self.processes = Processes(name, ranks, self._options.env)
        self.monitor: HeartbeatMonitor | None = None
        self.routes: dict[Dispatch, Route] = {}
        self._calls: RankCalls | None = None  # once the processes are up
        self._is_begun = False
        self._looked_at = 0.0
        self._ending = threading.RLock()  # held while processes are spawned or killed
        self.failure_domain = failure_domain or FailureDomain()
        self.failure_domain.share(self)

    def __enter__(self) -> ProcessPool:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Shut down. When the block ends without an error, first wait for running calls, which may raise."""
        try:
            if kind is None:
                self.settle()
        finally:
            self.shutdown()

    @property
    def pids(self) -> list[int]:
        """Process id of every rank, each on its own node."""
        return [process.pid for process in self.processes.infos]

    def handle(self, role: str, kind: type[Kind]) -> Kind:
        """Return a role's handle, which a type checker takes for the role's class; HOST: the host's own methods."""
        return cast(Kind, Handle(kind, self.targets(role), self.submit))

    def host(self, kind: type[Kind]) -> Kind:
        """Return the handle of the hosts' own methods."""
        return self.handle(HOST, kind)

    def targets(self, role: str) -> dict[str, Target]:
        """Return the methods that a handle of the role calls, by name."""
        return self.all_targets[role]

    def start(self) -> None:
        """Call `begin` and wait; on any error no process is left running. Raises the errors of the future."""
        future = self.begin()
        try:
            with self._options.observer.waiting("init"):
                future.get()
        except BaseException:
            self.shutdown()
            raise

    def begin(self, numbered: list[ProcessInfo] | None = None, timeout_s: float = START_TIMEOUT_S) -> StartFuture:
        """Start the processes, construct the hosts and read their coordinates; do not wait. A pool starts once.

        numbered: processes of all pools, where there are several; their nodes are numbered in this order, and this pool
        appends its processes on other nodes. The start proceeds while its future is waited for. The future raises
        WorkerFailure when processes do not come up or hosts are missing after `timeout_s`, and the error of a host's
        constructor.
        """
        if self._is_begun:
            raise RuntimeError(f"the pool {self.name} was started before")
        self._is_begun = True
        if not self.processes.started:
            self.spawn()
        return StartFuture(self, self._starting([] if numbered is None else numbered), timeout_s)

    def spawn(self) -> None:
        """Start the processes and do not wait for them."""
        try:
            with self._ending:
                self.failure_domain.raise_if_ended()
                self.processes.spawn()
        except BaseException:
            self.shutdown()
            raise

    def wait_for_processes(self) -> list[ProcessInfo]:
        """Wait until all spawned processes are up; return where they run. Raises WorkerFailure when they fail to."""
        StartFuture(self, self._coming_up(), START_TIMEOUT_S).get()
        return self.processes.infos

    def _coming_up(self) -> Iterator[WaitStep]:
        yield WaitStep("processes", "came up", self.processes.coming_up())
        with self._needing_processes():
            self.processes.describe()

    @contextmanager
    def _needing_processes(self) -> Iterator[None]:
        try:
            yield
        except ProcessDied as error:
            why = str(error).strip().splitlines()[-1]
            raise WorkerFailure(f"the processes of pool {self.name} did not start: {why}", is_loss=True) from None

    def _starting(self, numbered: list[ProcessInfo]) -> Iterator[WaitStep]:
        """Run the start after `spawn`, one step after the other."""
        yield from self._coming_up()
        started, processes = self.processes.started, self.processes.infos
        options, ranks = self._options, self._ranks
        nodes = {process.node_id for process in numbered}
        numbered += [process for process in processes if process.node_id not in nodes]
        listen = dumps(("listen_for_ranks", (node_addresses(processes, numbered)[0],)))
        listening = send_together([(started[0], listen)])
        yield WaitStep("first ranks", "listened", listening)
        with self._needing_processes():
            variables = place_variables(processes, listening[0].result(), numbered)
        if options.sees_node:
            variables = [place | gpus for place, gpus in zip(variables, gpu_variables(processes), strict=True)]
        only_here = all(process.is_local for process in processes)
        with self._ending:
            self.failure_domain.raise_if_ended()
            self.monitor = monitor = HeartbeatMonitor(
                LOOPBACK if only_here else ranks.address, ranks.world_size, options.limits
            )
        self._calls = calls = RankCalls(started, processes, monitor, options.grace_s)
        name, pickled = self._host_class.__name__, dumps((self._host_class, self._args))
        messages = [dumps(("construct", (name, place, pickled, monitor.address))) for place in variables]
        answers = calls.send(name, "__init__", dict(enumerate(messages)))
        yield WaitStep("hosts", "were constructed", answers)
        coordinates: list[Coordinates] = self._collect(calls, "__init__", answers)
        self.routes = {dispatch: route_call(dispatch, ranks.world_size, coordinates) for dispatch in Dispatch}

    def settle(self) -> None:
        """Wait for all running calls. Raises the errors of `Future.get`."""
        if self.failure_domain.error is None and self._calls is not None:
            try:
                self._calls.wait_for_all(self.failure_domain.look)
            except CallsFailed as error:
                self._end(error.failures)

    def shutdown(self, reason: MegatronRLError | None = None) -> None:
        """Kill all processes and wait until those on this node are gone; a second call does nothing.

        reason: raised by later calls and by calls that another thread waits for, unless the pool has ended before.
        """
        self.kill(reason)
        self.processes.wait_until_gone()

    def kill(self, reason: MegatronRLError | None = None) -> None:
        """Shut down without waiting."""
        self.failure_domain.decide(reason or WorkerFailure("the pool was shut down"))
        is_free = self._ending.acquire(timeout=CALL_LIMIT_S)  # a call into a lost launcher may never return
        try:
            if self.monitor is not None:
                self.monitor.close()
            self.processes.kill()
        finally:
            if is_free:
                self._ending.release()

    def raise_if_failed(self) -> None:
        """Raise, and end all pools of the domain, if a rank has failed in any call, waited for or not."""
        self._looked_at = time.monotonic()
        if self._calls is not None:
            try:
                self.failure_domain.raise_if_ended()
                self._calls.raise_if_failed()
            except CallsFailed as error:
                self._end(error.failures)

    def look_if_due(self) -> None:
        """Call `raise_if_failed`, unless the last call was less than LOOK_S ago."""
        if time.monotonic() - self._looked_at >= LOOK_S:
            self.raise_if_failed()

    def failures_now(self) -> list[RankFailure]:
        """Return the failures of the ranks so far."""
        calls = self._calls
        return [] if calls is None else [replace(failure, pool=self.name) for failure in calls.failures_so_far()]

    def submit(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """Have the ranks run a method, for a handle."""
        self.failure_domain.raise_if_ended()
        if self._calls is None or not self.routes:
            raise RuntimeError(f"start the pool {self.name} before calling {target.method}")
        self._options.observer.before(target.mark)
        self.raise_if_failed()
        with self._ending:
            self.failure_domain.raise_if_ended()
            return self._send(self._calls, target, args, kwargs)

    def _send(self, calls: RankCalls, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallFuture[Any]:
        mark = target.mark
        splits = mark.dispatch is Dispatch.DP
        route = self.routes[mark.dispatch]
        work = self._options.work if mark.balanced else None
        if splits:
            split = split_call(args, kwargs, len(route.collectors), work)
        else:
            split = Split(payloads_of_replicas(args, kwargs, len(set(route.chunk_of_rank.values()))))
        # Where nothing is cut, all chunks are one payload, which is packed once.
        distinct = {id(payload): payload for payload in split.payloads}
        place = (target.role, target.method, mark.dispatch)
        shared = {key: self._ranks.share(*packed(("run", (*place, payload)))) for key, payload in distinct.items()}
        chunks = [shared[id(payload)] for payload in split.payloads]
        ranks = sorted(route.chunk_of_rank)
        messages = {rank: chunks[route.chunk_of_rank[rank]] for rank in ranks}
        answers = calls.send(target.who, target.method, messages)

        def fetch(timeout: float | None) -> Any:
            with self._options.observer.waiting(target.phase):
                collected = self._collect(calls, target.method, answers, timeout)
            answer_of_rank = dict(zip(ranks, collected, strict=True))
            answered: list[Answered] = [answer_of_rank[rank] for rank in route.collectors]
            self._note(target, answered)
            values = [answer.value for answer in answered]
            if splits:
                return join_answers(values, split)
            return values[0] if mark.dispatch is Dispatch.RANK_ZERO else values

        return CallFuture(fetch, self, answers)

    def _note(self, target: Target, answered: Sequence[Answered]) -> None:
        start, stop = min(answer.start for answer in answered), max(answer.stop for answer in answered)
        seconds = max(answer.stop - answer.start for answer in answered)
        interval = CallInterval(self.name, target.role, target.method, target.phase, start, stop, seconds)
        self._options.observer.ran(interval)

    def _collect(
        self, calls: RankCalls, method: str, answers: Sequence[RankAnswer[Any]], timeout: float | None = None
    ) -> list[Any]:
        """Call `RankCalls.wait`; a failure or an interrupt ends all pools of the domain."""
        try:
            self.failure_domain.raise_if_ended()
            return calls.wait(method, answers, timeout, self.failure_domain.look)
        except CallsFailed as error:
            self._end(error.failures)
        except (KeyboardInterrupt, SystemExit):
            self.shutdown()
            raise

    def _end(self, failures: Sequence[RankFailure]) -> NoReturn:
        self.failure_domain.end(self, [replace(failure, pool=self.name) for failure in failures])


def at_work(pool: ProcessPool) -> str:
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
