"""One process per rank, called as one object: a verb of the worker class is a method of the group.

    with ResourcePool(1, 4, "cpu") as pool, WorkerGroup(pool, Worker, config) as group:
        log_probs = group.compute_log_probs(sequences)  # returns at once
        ...
        log_probs.get()                                 # waits; raises what went wrong on any rank

A call splits its records into chunks and stores each once, sends every rank one message, waits for one answer of each
and joins those of the collectors (the others are empty). A failure on one rank ends the group, because the other ranks
would wait for that one in their next collective; so does a rank that stops answering or getting on (`watch`).
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray import ObjectRef, cloudpickle
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from megatron_rl.balance import SequenceWork
from megatron_rl.cluster.calls import CallsFailed, RankCalls
from megatron_rl.cluster.failures import RankFailure, to_error
from megatron_rl.cluster.messages import pack
from megatron_rl.cluster.nodes import LOOPBACK, node_addresses, place_variables
from megatron_rl.cluster.resource_pool import ResourcePool
from megatron_rl.cluster.routing import Route, Split, join_answers, route_call, split_call
from megatron_rl.cluster.watch import Limits, Watch
from megatron_rl.cluster.worker_process import ProcessInfo, wait_until_gone, with_verbs
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
    LOCAL_RANK (the index of their device among those they see), LOCAL_WORLD_SIZE and `nodes.place_variables` in their
    environment, along with `env`, before their class is imported, and import from where the driver does. Rank 0 also
    finds MASTER_LISTEN_FD, a socket that listens at MASTER_ADDR and MASTER_PORT and that it must take
    (`roles/rendezvous.py` does).

    `work` evens out what data-parallel ranks get of the rows of balanced verbs; without it rows keep their order.
    `limits`: when a rank that neither raises nor dies has failed.

    After a rank failed, its peers get `grace_s` seconds to report what they saw before all processes are killed.
    `direct_ranks`: a larger world is called through one rank of each node.
    """

    def __init__(
        self,
        pool: ResourcePool,
        worker_class: type,
        *args: Any,
        env: dict[str, str] | None = None,
        work: SequenceWork | None = None,
        limits: Limits | None = None,
        grace_s: float = 3.0,
        direct_ranks: int = 128,
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
        self._limits = limits or Limits()
        self._grace_s = grace_s
        self._direct_ranks = direct_ranks
        self._watch: Watch | None = None
        self._handles: list[ActorHandle] = []
        self._processes: list[ProcessInfo] = []
        self._routes: dict[Dispatch, Route] = {}
        self._calls: RankCalls | None = None  # once the processes are up
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
                self._calls.wait_for_all()
        except CallsFailed as error:
            self._end(error.failures)
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
        role, world_size = self._worker_class.__name__, self._pool.world_size
        try:
            process_class = with_verbs(role, self.verbs)
            self._handles = [self._spawn(process_class, rank) for rank in range(world_size)]
            self._processes = self._wait_for_processes()
            pickled = ray.put(cloudpickle.dumps((self._worker_class, self._args)))
            only_here = all(process.is_local for process in self._processes)
            self._watch = Watch(LOOPBACK if only_here else ray.util.get_node_ip_address(), world_size, self._limits)
            node_size = self._pool.num_ranks_per_node if world_size > self._direct_ranks else 1
            self._calls = RankCalls(self._handles, self._processes, self._watch, node_size, self._grace_s)
            port = ray.get(self._handles[0].listen_for_ranks.remote(node_addresses(self._processes)[0]))
            variables = place_variables(self._processes, port)
            answers = self._calls.construct(role, variables, pickled, self._watch.address)
            coordinates: list[Coordinates] = self._collect("__init__", answers, timeout=None)
            self._routes = {dispatch: route_call(dispatch, world_size, coordinates) for dispatch in Dispatch}
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Kill all processes and wait until those on this node are gone. Later calls raise; repeating it is free."""
        if self._ended is None:
            self._ended = WorkerFailure("the worker group was shut down")
        if self._watch is not None:
            self._watch.close()
        handles, self._handles = self._handles, []
        # Without Ray they are gone, and ray.kill would start it again, or wait for a server that is gone.
        if handles and ray.is_initialized() and not self._pool.is_lost:
            for handle in handles:
                ray.kill(handle)
            wait_until_gone([process.pid for process in self._processes if process.is_local])

    def _bind(self, name: str, method: Callable) -> Callable[..., Future]:
        @functools.wraps(method)
        def call(group: WorkerGroup, *args: Any, **kwargs: Any) -> Future:
            return group._submit(name, args, kwargs)

        return types.MethodType(call, self)

    def _spawn(self, process_class: type, rank: int) -> ActorHandle:
        env = {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            **self._env,
            **self._pool.variables,
            "RANK": str(rank),
            "WORLD_SIZE": str(self._pool.world_size),
            "LOCAL_RANK": str(self._pool.device_index(rank)),
            "LOCAL_WORLD_SIZE": str(self._pool.num_ranks_per_node),
        }
        options = self._pool.actor_options(rank) | {"max_restarts": 0, "max_concurrency": 1}
        return ray.remote(process_class).options(**options, runtime_env={"env_vars": env}).remote(rank)

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
        self._raise_if_ended()
        if self._calls is None:
            raise RuntimeError(f"start the worker group before calling {name}")
        try:
            self._calls.raise_if_failed()
        except CallsFailed as error:
            self._end(error.failures)
        verb = self.verbs[name]
        splits = verb.dispatch in (Dispatch.DP, Dispatch.ROLLOUT_DP)
        route = self._routes[verb.dispatch]
        work = self._work if verb.balanced else None
        split = split_call(args, kwargs, len(route.collectors), work) if splits else Split([(args, kwargs)])
        # Chunks of a call without records are one and the same payload.
        different = {id(payload): payload for payload in split.payloads}
        packed = {key: pack(payload, split.sizes is not None) for key, payload in different.items()}
        chunks = [packed[id(payload)] for payload in split.payloads]
        ranks = sorted(route.chunk_of_rank)
        answers = self._calls.send(verb.role, name, {rank: chunks[route.chunk_of_rank[rank]] for rank in ranks})

        def fetch(timeout: float | None) -> Any:
            got = dict(zip(ranks, self._collect(name, answers, timeout), strict=True))
            collected = [got[rank] for rank in route.collectors]
            if splits:
                return join_answers(collected, split)
            return collected[0] if verb.dispatch is Dispatch.RANK_ZERO else collected

        return Future(fetch)

    def _collect(self, what: str, answers: Sequence[ObjectRef], timeout: float | None) -> list[Any]:
        """`RankCalls.wait`, where a failure or an interrupt ends the group."""
        self._raise_if_ended()
        try:
            return self._calls.wait(what, answers, timeout)
        except CallsFailed as error:
            self._end(error.failures)
        except (KeyboardInterrupt, SystemExit):
            self.shutdown()
            raise

    def _end(self, failures: Sequence[RankFailure]) -> None:
        self._ended = to_error(failures)
        self.shutdown()
        self._raise_if_ended()

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
