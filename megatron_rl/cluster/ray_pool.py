"""One process per rank of a pool, called role by role: a verb of a role is a method of the role's handle.

    with ResourcePool(1, 4, "cpu") as ranks, RayPool("train", ranks, Host, config, roles={"actor": Actor}) as pool:
        actor = pool.handle("actor", Actor)
        log_probs = actor.log_probs(sequences)  # returns at once
        ...
        log_probs.get()                         # waits; raises what went wrong on any rank

A call splits its records into chunks and stores each once, sends every rank one message, waits for one answer of each
and joins those of the collectors (the others are empty). A failure on one rank ends the pool, because the other ranks
would wait for that one in their next collective; so does a rank that stops answering or getting on (`watch`); and a
pool that ends takes the others of its cluster with it (`Fate`).
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar, cast

import ray
from ray import ObjectRef, cloudpickle
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from megatron_rl.balance import SequenceWork
from megatron_rl.cluster.calls import CallsFailed, RankCalls
from megatron_rl.cluster.failures import RankFailure
from megatron_rl.cluster.handle import HOST, Fate, Handle, Target, all_targets
from megatron_rl.cluster.messages import pack
from megatron_rl.cluster.nodes import LOOPBACK, node_addresses, place_variables
from megatron_rl.cluster.resource_pool import ResourcePool
from megatron_rl.cluster.routing import Route, Split, join_answers, route_call, split_call
from megatron_rl.cluster.watch import Limits, Watch
from megatron_rl.cluster.worker_process import Answered, ProcessInfo, wait_until_gone, with_verbs
from megatron_rl.dispatch import Coordinates, Dispatch, Future, Interval, Nobody, Observer
from megatron_rl.errors import WorkerFailure

_START_TIMEOUT_S = 300.0  # generous: only ranks that another pool occupies are waited for in vain
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class PoolOptions:
    """How a pool runs beside its ranks and roles.

    env: variables of every rank. work: evens out what data-parallel ranks get of the rows of balanced verbs; without it
    rows keep their order. limits: when a rank that neither raises nor dies has failed. phases: role -> what "score" and
    "update" stand for in the phases of its verbs. After a rank failed, its peers get `grace_s` seconds to report what
    they saw before all processes are killed. direct_ranks: a larger world is called through one rank of each node.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    work: SequenceWork | None = None
    limits: Limits = Limits()
    phases: Mapping[str, dict[str, str]] = field(default_factory=dict)
    observer: Observer = Nobody()
    grace_s: float = 3.0
    direct_ranks: int = 128


class RayPool:
    """One `host_class(*args)` on every rank; call `start` or use it as a context manager.

    ranks: where they run, entered. host_class must have the ONE_TO_ALL verb `coordinates()`, which returns
    `dispatch.Coordinates`, and where there are `roles` (name -> class) `run(role, verb, args, kwargs)`. Hosts find
    RANK, WORLD_SIZE, LOCAL_RANK (the index of their device among those they see), LOCAL_WORLD_SIZE and
    `nodes.place_variables` in their environment, before their class is imported, and import from where the driver does.
    Rank 0 also finds MASTER_LISTEN_FD, a socket that listens at MASTER_ADDR and MASTER_PORT and that it must take
    (`roles/rendezvous.py` does).

    Raises TypeError for a host class without `coordinates`.
    """

    def __init__(
        self,
        name: str,
        ranks: ResourcePool,
        host_class: type,
        *args: Any,
        roles: Mapping[str, type] | None = None,
        options: PoolOptions | None = None,
        fate: Fate | None = None,
    ) -> None:
        self.name = name
        self._ranks = ranks
        self._host_class, self._args = host_class, args
        self._options = options or PoolOptions()
        self._targets = all_targets(host_class, roles or {}, self._options.phases)
        coordinates = self._targets[HOST].get("coordinates")
        if coordinates is None or coordinates.mark.dispatch is not Dispatch.ONE_TO_ALL:
            raise TypeError(f"{host_class.__name__} must have a ONE_TO_ALL verb `coordinates`")
        self._watch: Watch | None = None
        self._handles: list[ActorHandle] = []
        self._processes: list[ProcessInfo] = []
        self._routes: dict[Dispatch, Route] = {}
        self._calls: RankCalls | None = None  # once the processes are up
        self._fate = fate or Fate()
        self._fate.share(self)

    def __enter__(self) -> RayPool:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Shut down; when leaving without an error, calls still running are waited for and may raise first."""
        try:
            if kind is None:
                self.settle()
        finally:
            self.shutdown()

    @property
    def pids(self) -> list[int]:
        """Process id of every rank, each on its own node."""
        return [process.pid for process in self._processes]

    def handle(self, role: str, kind: type[Kind]) -> Kind:
        """A role's handle, which looks like the role's class to a type checker; HOST: the host's own verbs."""
        return cast(Kind, Handle(kind, self._targets[role], self._submit))

    def host(self, kind: type[Kind]) -> Kind:
        """The handle of the verbs that the hosts themselves have."""
        return self.handle(HOST, kind)

    def start(self, neighbours: Sequence[ProcessInfo] = ()) -> None:
        """Start the processes, construct the hosts and read their coordinates; on any error nothing is left running.

        neighbours: the processes of all pools, this one's among them, where there are several. A pool starts once.
        Raises WorkerFailure when processes do not come up, else what a host's constructor raised, as `Future.get`.
        """
        if not self._handles:
            self.spawn()
        if self._calls is not None:
            raise RuntimeError(f"the pool {self.name} was started before")
        role, world_size = self._host_class.__name__, self._ranks.world_size
        options = self._options
        try:
            self.wait_for_processes()
            everybody = neighbours or self._processes
            pickled = ray.put(cloudpickle.dumps((self._host_class, self._args)))
            only_here = all(process.is_local for process in self._processes)
            self._watch = Watch(LOOPBACK if only_here else ray.util.get_node_ip_address(), world_size, options.limits)
            node_size = self._ranks.num_ranks_per_node if world_size > options.direct_ranks else 1
            self._calls = RankCalls(self._handles, self._processes, self._watch, node_size, options.grace_s)
            port = ray.get(self._handles[0].listen_for_ranks.remote(node_addresses(self._processes, everybody)[0]))
            variables = place_variables(self._processes, port, everybody)
            answers = self._calls.construct(role, variables, pickled, self._watch.address)
            coordinates: list[Coordinates] = self._collect(self._calls, "__init__", "init", answers)
            self._routes = {dispatch: route_call(dispatch, world_size, coordinates) for dispatch in Dispatch}
        except BaseException:
            self.shutdown()
            raise

    def spawn(self) -> None:
        """Begin to start the processes, and do not wait for them; `start` does."""
        self._fate.raise_if_ended()
        methods = {target.method: target for verbs in self._targets.values() for target in verbs.values()}
        process_class = with_verbs(self._host_class.__name__, methods)
        try:
            self._handles = [self._spawn(process_class, rank) for rank in range(self._ranks.world_size)]
        except BaseException:
            self.shutdown()
            raise

    def settle(self) -> None:
        """Wait for all calls that still run. Raises as `Future.get`."""
        if self._fate.error is None and self._calls is not None:
            try:
                self._calls.wait_for_all(self._fate.look)
            except CallsFailed as error:
                self._end(error.failures)

    def shutdown(self) -> None:
        """Kill all processes and wait until those on this node are gone. Later calls raise; repeating it is free."""
        if self._fate.error is None:
            self._fate.error = WorkerFailure("the pool was shut down")
        if self._watch is not None:
            self._watch.close()
        handles, self._handles = self._handles, []
        # Without Ray they are gone, and ray.kill would start it again, or wait for a server that is gone.
        if handles and ray.is_initialized() and not self._ranks.is_lost:
            for handle in handles:
                ray.kill(handle)
            wait_until_gone([process.pid for process in self._processes if process.is_local])

    def raise_if_failed(self) -> None:
        """Raise, and end all pools, where a rank has failed in a call that nobody may ever wait for."""
        if self._calls is not None and self._fate.error is None:
            try:
                self._calls.raise_if_failed()
            except CallsFailed as error:
                self._end(error.failures)

    def failures_now(self) -> list[RankFailure]:
        """What the ranks have failed with until now."""
        return [] if self._calls is None else [self._named(failure) for failure in self._calls.failures(0.0)]

    def _spawn(self, process_class: type, rank: int) -> ActorHandle:
        env = {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            **self._options.env,
            **self._ranks.variables,
            "RANK": str(rank),
            "WORLD_SIZE": str(self._ranks.world_size),
            "LOCAL_RANK": str(self._ranks.device_index(rank)),
            "LOCAL_WORLD_SIZE": str(self._ranks.num_ranks_per_node),
        }
        options = self._ranks.actor_options(rank) | {"max_restarts": 0, "max_concurrency": 1}
        return ray.remote(process_class).options(**options, runtime_env={"env_vars": env}).remote(rank)

    def wait_for_processes(self) -> list[ProcessInfo]:
        """Where the processes run, once all are up. Raises WorkerFailure when they do not come up."""
        if not self._processes:
            self._processes = self._answered_processes()
        return self._processes

    def _answered_processes(self) -> list[ProcessInfo]:
        answers = [handle.describe_process.remote() for handle in self._handles]
        try:
            processes: list[ProcessInfo] = ray.get(answers, timeout=_START_TIMEOUT_S)
            return processes
        except GetTimeoutError:
            num_up = len(ray.wait(answers, num_returns=len(answers), timeout=0)[0])
            raise WorkerFailure(
                f"{num_up} of {len(answers)} processes of pool {self.name} came up in {_START_TIMEOUT_S:g} s; "
                "does another pool still occupy its ranks?"
            ) from None
        except RayError as error:
            raise WorkerFailure(f"the processes of pool {self.name} did not come up: {error}") from error

    def _submit(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        self._fate.raise_if_ended()
        calls = self._calls
        if calls is None:
            raise RuntimeError(f"start the pool {self.name} before calling {target.verb}")
        self._options.observer.before(target.mark)
        self.raise_if_failed()
        mark = target.mark
        splits = mark.dispatch in (Dispatch.DP, Dispatch.ROLLOUT_DP)
        route = self._routes[mark.dispatch]
        work = self._options.work if mark.balanced else None
        split = split_call(args, kwargs, len(route.collectors), work) if splits else Split([(args, kwargs)])
        # Chunks of a call without records are one and the same payload.
        different = {id(payload): payload for payload in split.payloads}
        packed = {key: pack(payload, split.sizes is not None) for key, payload in different.items()}
        chunks = [packed[id(payload)] for payload in split.payloads]
        ranks = sorted(route.chunk_of_rank)
        messages = {rank: chunks[route.chunk_of_rank[rank]] for rank in ranks}
        answers = calls.send(target.who, target.verb, target.method, messages)

        def fetch(timeout: float | None) -> Any:
            collected = self._collect(calls, target.verb, target.phase, answers, timeout)
            got = dict(zip(ranks, collected, strict=True))
            answered: list[Answered] = [got[rank] for rank in route.collectors]
            self._note(target, answered)
            values = [one.value for one in answered]
            if splits:
                return join_answers(values, split)
            return values[0] if mark.dispatch is Dispatch.RANK_ZERO else values

        return Future(fetch)

    def _note(self, target: Target, answered: Sequence[Answered]) -> None:
        start, stop = min(one.start for one in answered), max(one.stop for one in answered)
        seconds = max(one.stop - one.start for one in answered)
        interval = Interval(self.name, target.role, target.verb, target.phase, start, stop, seconds)
        self._options.observer.ran(interval)

    def _collect(
        self, calls: RankCalls, verb: str, phase: str, answers: Sequence[ObjectRef], timeout: float | None = None
    ) -> list[Any]:
        """`RankCalls.wait`, where a failure or an interrupt ends all pools."""
        self._fate.raise_if_ended()
        try:
            with self._options.observer.waiting(phase):
                return calls.wait(verb, answers, timeout, self._fate.look)
        except CallsFailed as error:
            self._end(error.failures)
        except (KeyboardInterrupt, SystemExit):
            self.shutdown()
            raise

    def _end(self, failures: Sequence[RankFailure]) -> NoReturn:
        self._fate.end(self, [self._named(failure) for failure in failures])

    def _named(self, failure: RankFailure) -> RankFailure:
        return replace(failure, pool=self.name)
