"""One process per rank, called as one object: a verb of the worker class is a method of the group.

    with ResourcePool(1, 4, "cpu") as pool, WorkerGroup(pool, Worker, config) as group:
        log_probs = group.compute_log_probs(sequences)  # returns at once
        ...
        log_probs.get()                                 # waits; raises what went wrong on any rank

A call splits its records into chunks and stores each once, starts the verb on every rank, waits for the report of
all ranks and joins the collectors' answers. A failure on one rank ends the group, because the other ranks would wait
for that one in their next collective.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray import ObjectRef, cloudpickle
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from megatron_rl.balance import SequenceWork
from megatron_rl.controller.failures import RankFailure, to_error
from megatron_rl.controller.resource_pool import ResourcePool
from megatron_rl.controller.routing import Split, join_answers, route_call, split_call
from megatron_rl.controller.worker_process import Call, ProcessInfo, WorkerProcess, read_report, wait_until_gone
from megatron_rl.dispatch import Coordinates, Dispatch, Verb
from megatron_rl.errors import MegatronRLError, WorkerFailure

_START_TIMEOUT_S = 300.0  # generous: only a pool that is occupied by another group waits in vain


class Future:
    """The result of a call that may still run."""

    def __init__(self, fetch: Callable[[float | None], Any]) -> None:
        self._fetch: Callable[[float | None], Any] | None = fetch
        self._result: Any = None

    def get(self, timeout: float | None = None) -> Any:
        """Wait for all ranks and return the joined answer (see `routing.join_answers`).

        Raises WorkerFailure (or the worker's own MegatronRLError) when any rank failed in this call or an earlier one;
        the group is then over. Raises TimeoutError after `timeout` seconds; the call goes on and `get` may be repeated.
        """
        if self._fetch is not None:
            self._result = self._fetch(timeout)
            self._fetch = None
        return self._result


class WorkerGroup:
    """One `worker_class(*args)` on every rank of an entered pool; call `start` or use it as a context manager.

    Every `@register`-marked method becomes a method of the group that returns a `Future`; `verbs` lists them. One of
    them must be `coordinates()`, ONE_TO_ALL, returning `dispatch.Coordinates`. Workers find RANK, WORLD_SIZE,
    LOCAL_RANK (the index of their device among those they see), LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in
    their environment, along with `env`, before their class is imported, and import from where the driver does.

    `work` evens out what data-parallel ranks get of the rows of balanced verbs; without it rows keep their order.

    After a rank failed, its peers get `grace_s` seconds to report what they saw before all processes are killed.
    """

    def __init__(
        self,
        pool: ResourcePool,
        worker_class: type,
        *args: Any,
        env: dict[str, str] | None = None,
        work: SequenceWork | None = None,
        grace_s: float = 3.0,
    ) -> None:
        methods = _registered_methods(worker_class)
        self.verbs: dict[str, Verb] = {name: method.verb for name, method in methods.items()}
        for name, method in methods.items():
            setattr(self, name, self._bind(name, method))
        self._pool = pool
        self._worker_class = worker_class
        self._args = args
        self._env = env or {}
        self._work = work
        self._grace_s = grace_s
        self._handles: list[ActorHandle] = []
        self._processes: list[ProcessInfo] = []
        self._coordinates: tuple[Coordinates, ...] = ()
        self._unread: dict[ObjectRef, Call] = {}  # reports of calls that nobody has looked at yet
        self._ended: MegatronRLError | None = None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no verb {name!r} in this worker group; its verbs are: {', '.join(sorted(self.verbs))}")

    def __enter__(self) -> WorkerGroup:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Shut down; when leaving without an error, calls still running are waited for and may raise first."""
        try:
            if kind is None and self._ended is None:
                self._wait("the calls still running", list(self._unread), timeout=None)
        finally:
            self.shutdown()

    @property
    def pids(self) -> list[int]:
        """Process id of every rank, each on its own node."""
        return [process.pid for process in self._processes]

    def start(self) -> None:
        """Start the processes, construct the workers and read their coordinates; on any error nothing is left running.

        Raises WorkerFailure when processes do not come up, else what a worker's constructor raised, as `Future.get`.
        A group starts once.
        """
        self._raise_if_ended()
        if self._handles:
            raise RuntimeError("the worker group was started before")
        role = self._worker_class.__name__
        try:
            self._handles = [self._spawn(rank) for rank in range(self._pool.world_size)]
            self._processes = self._wait_for_processes()
            master = {"MASTER_ADDR": self._processes[0].host, "MASTER_PORT": str(self._processes[0].free_port)}
            pickled = ray.put(cloudpickle.dumps((self._worker_class, self._args)))
            reports = [handle.construct.remote(role, master, pickled) for handle in self._handles]
            self._unread |= {report: Call(rank, role, "__init__") for rank, report in enumerate(reports)}
            self._wait("__init__", reports, timeout=None)
            self._coordinates = tuple(self.coordinates().get())
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Kill all processes and wait until those on this node are gone. Later calls raise; repeating it is free."""
        if self._ended is None:
            self._ended = WorkerFailure("the worker group was shut down")
        handles, self._handles, self._unread = self._handles, [], {}
        if handles and ray.is_initialized():  # without Ray they are gone, and ray.kill would start it again
            for handle in handles:
                ray.kill(handle)
            node = ray.get_runtime_context().get_node_id()
            wait_until_gone([process.pid for process in self._processes if process.node_id == node])

    def _bind(self, name: str, method: Callable) -> Callable[..., Future]:
        @functools.wraps(method)
        def call(group: WorkerGroup, *args: Any, **kwargs: Any) -> Future:
            return group._submit(name, args, kwargs)

        return types.MethodType(call, self)

    def _spawn(self, rank: int) -> ActorHandle:
        env = {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            **self._env,
            "RANK": str(rank),
            "WORLD_SIZE": str(self._pool.world_size),
            "LOCAL_RANK": str(self._pool.device_index(rank)),
            "LOCAL_WORLD_SIZE": str(self._pool.num_ranks_per_node),
        }
        options = self._pool.actor_options(rank) | {"max_restarts": 0, "max_concurrency": 1}
        return ray.remote(WorkerProcess).options(**options, runtime_env={"env_vars": env}).remote(rank)

    def _wait_for_processes(self) -> list[ProcessInfo]:
        answers = [handle.describe_process.remote() for handle in self._handles]
        try:
            return ray.get(answers, timeout=_START_TIMEOUT_S)
        except GetTimeoutError:
            num_up = len(ray.wait(answers, num_returns=len(answers), timeout=0)[0])
            raise WorkerFailure(
                f"{num_up} of {len(answers)} worker processes came up in {_START_TIMEOUT_S:g} s; "
                "does another worker group still occupy the pool?"
            ) from None
        except RayError as error:
            raise WorkerFailure(f"the worker processes did not come up: {error}") from error

    def _submit(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Future:
        if self._ended is None and self._unread:
            self._read_reports(count=len(self._unread), timeout=0)
        self._raise_if_ended()
        if not self._handles:
            raise RuntimeError(f"start the worker group before calling {name}")
        verb = self.verbs[name]
        splits = verb.dispatch in (Dispatch.DP, Dispatch.ROLLOUT_DP)
        route = route_call(verb.dispatch, self._pool.world_size, self._coordinates)
        work = self._work if verb.balanced else None
        split = split_call(args, kwargs, len(route.collectors), work) if splits else Split([(args, kwargs)])
        boxes = [ray.put(payload) for payload in split.payloads]
        reports, answers = [], {}
        for rank, chunk in route.chunk_of_rank.items():
            wanted = rank in route.collectors
            answers[rank], report = self._handles[rank].call.remote(verb.role, name, wanted, boxes[chunk])
            self._unread[report] = Call(rank, verb.role, name)
            reports.append(report)

        def fetch(timeout: float | None) -> Any:
            collected = self._fetch(name, reports, [answers[rank] for rank in route.collectors], timeout)
            if splits:
                return join_answers(collected, split)
            return collected[0] if verb.dispatch is Dispatch.RANK_ZERO else collected

        return Future(fetch)

    def _fetch(
        self, verb: str, reports: Sequence[ObjectRef], answers: Sequence[ObjectRef], timeout: float | None
    ) -> list[Any]:
        self._raise_if_ended()
        try:
            self._wait(verb, reports, timeout)
            return ray.get(answers)
        except (KeyboardInterrupt, SystemExit):
            self.shutdown()
            raise

    def _wait(self, what: str, reports: Sequence[ObjectRef], timeout: float | None) -> None:
        """Return when all `reports` are in. Any rank's failure raises, also one of another call that is still open."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while missing := [self._unread[report].rank for report in reports if report in self._unread]:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._read_reports(count=1, timeout=left):
                raise TimeoutError(f"{what}: no report from ranks {missing} in {timeout:g} s")

    def _read_reports(self, count: int, timeout: float | None) -> int:
        """Wait for up to `count` unread reports and read them; the number read. Ends the group on a failure."""
        ready, _ = ray.wait(list(self._unread), num_returns=count, timeout=timeout)
        failures = self._take_failures(ready)
        if failures:
            if self._unread:
                late, _ = ray.wait(list(self._unread), num_returns=len(self._unread), timeout=self._grace_s)
                failures += self._take_failures(late)
            self._ended = to_error(failures)
            self.shutdown()
            self._raise_if_ended()
        return len(ready)

    def _take_failures(self, reports: Sequence[ObjectRef]) -> list[RankFailure]:
        read = [read_report(report, self._unread.pop(report)) for report in reports]
        return [failure for failure in read if failure is not None]

    def _raise_if_ended(self) -> None:
        if self._ended is not None:
            raise self._ended.with_traceback(None)


def _registered_methods(worker_class: type) -> dict[str, Callable]:
    """The verbs of a worker class. Raises TypeError when `coordinates` is missing or a name is the group's own."""
    members = inspect.getmembers(worker_class, inspect.isfunction)
    methods = {name: method for name, method in members if hasattr(method, "verb")}
    taken = sorted(methods.keys() & set(dir(WorkerGroup)))
    if taken:
        raise TypeError(f"{worker_class.__name__} registers {taken}, which WorkerGroup itself defines; rename them")
    if "coordinates" not in methods or methods["coordinates"].verb.dispatch is not Dispatch.ONE_TO_ALL:
        raise TypeError(f"{worker_class.__name__} must register a ONE_TO_ALL verb `coordinates`")
    return methods
