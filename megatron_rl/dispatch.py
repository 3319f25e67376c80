"""Declare how one controller call becomes one call per rank, and how the answers are joined.

A role marks methods with `@remote_method`; the controller reads the mark. A type checker sees such a method as the
controller's: it returns a `Future`. No Ray, no torch.distributed here.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, cast, overload

Params = ParamSpec("Params")
Answer = TypeVar("Answer")
Owner = TypeVar("Owner")


class Dispatch(enum.Enum):
    """Which rank gets which rows of the records in a call, and whose answer counts.

    ONE_TO_ALL: every rank gets every argument whole; returns all answers, as a list in rank order. DP: records are
    split over data-parallel ranks (all tp/pp ranks of one get the same rows); returns the joined answers of each
    data-parallel rank's collector (tp_rank 0 of the last pipeline stage). REPLICAS: in a pool of several rollout
    replicas the ranks of each get, of every dict, only the entry under its number, and other arguments whole; returns
    the answers of one rank of each replica, as a list. RANK_ZERO: only rank 0 is called; returns its answer.
    """

    ONE_TO_ALL = "one_to_all"
    DP = "dp"
    REPLICAS = "replicas"
    RANK_ZERO = "rank_zero"


class Stop(enum.Enum):
    """Whether a run that a signal has asked to stop may stop instead of calling a method.

    UNRELATED: no. BEFORE: yes. NEVER_AFTER: yes, but the method changes weights, so after its first call the step is
    always finished.
    """

    UNRELATED = enum.auto()
    BEFORE = enum.auto()
    NEVER_AFTER = enum.auto()


@dataclass(frozen=True)
class RemoteMethod:
    """The mark that `@remote_method` leaves on a method.

    phase: the name under which its time and memory are reported; "score" and "update" stand for the phases of the
    role's own passes (`RoleSpec`). balanced: rows may be split over data-parallel ranks by their lengths; the records
    must have `input_ids`, and the answers must be records, dicts or tuples of these. Rows of returned records are in
    the order of the call.
    """

    dispatch: Dispatch
    phase: str = ""
    balanced: bool = False
    stop: Stop = Stop.UNRELATED


@dataclass(frozen=True)
class ExtraBatch(Generic[Answer]):
    """A second record in a call, whose rows are split independently of the call's other records.

    A rank gets it with its share of the rows. If there are fewer rows than ranks, some get a row that does not count.
    """

    record: Answer


@dataclass(frozen=True)
class Coordinates:
    """The place of one rank, as it reports it once its process groups exist.

    dp_collector, replica_collector: whether this rank's answer counts for its data-parallel rank, and for its rollout
    replica.
    """

    rank: int
    dp_rank: int
    dp_size: int
    dp_collector: bool
    replica: int
    num_replicas: int
    replica_collector: bool


@dataclass(frozen=True)
class CallInterval:
    """The interval of one call: from the first to the last of the ranks whose answers count, in seconds since the
    epoch.

    seconds: duration on the slowest of them, by its own clock.
    """

    pool: str
    role: str
    remote_method: str
    phase: str
    start: float
    stop: float
    seconds: float


class Future(Generic[Answer]):
    """The result of a call that may still run."""

    def __init__(self, fetch: Callable[[float | None], Answer]) -> None:
        self._fetch: Callable[[float | None], Answer] | None = fetch
        self._result: Any = None

    @classmethod
    def done(cls, result: Answer) -> Future[Answer]:
        """A future of a call that has returned."""
        future = cls(lambda _: result)
        future.get()
        return future

    def get(self, timeout: float | None = None) -> Answer:
        """Wait for all ranks and return the joined answer (see `routing.join_answers`).

        Raises WorkerFailure (or the rank's own MegatronRLError) if any rank of any pool failed in this call or an
        earlier one; all pools are then ended. A failed replica ends only itself. Raises TimeoutError after `timeout`
        seconds; the call continues and `get` may be repeated.
        """
        if self._fetch is not None:
            self._result = self._fetch(timeout)
            self._fetch = None
        return cast(Answer, self._result)


class Observer(Protocol):
    """Is notified of the controller's calls; see `CallObserver`."""

    def before(self, remote_method: RemoteMethod) -> None:
        """A method is about to be called. May raise to stop the run instead."""

    def waiting(self, phase: str) -> AbstractContextManager[None]:
        """A context around the wait for an answer."""

    def ran(self, interval: CallInterval) -> None:
        """A method has been answered."""


class NullObserver:
    """An observer that ignores everything."""

    def before(self, remote_method: RemoteMethod) -> None:
        """No-op."""

    def waiting(self, phase: str) -> AbstractContextManager[None]:
        """No-op."""
        return nullcontext()

    def ran(self, interval: CallInterval) -> None:
        """No-op."""


def is_collector(dispatch: Dispatch, place: Coordinates) -> bool:
    """Whether the answer of the rank at `place` counts; other ranks drop theirs."""
    match dispatch:
        case Dispatch.DP:
            return place.dp_collector
        case Dispatch.REPLICAS:
            return place.replica_collector
    return True


@overload
def remote_method(
    dispatch: Literal[Dispatch.ONE_TO_ALL, Dispatch.REPLICAS],
    *,
    phase: str = ...,
    balanced: bool = ...,
    stop: Stop = ...,
) -> Callable[
    [Callable[Concatenate[Owner, Params], Answer]], Callable[Concatenate[Owner, Params], Future[list[Answer]]]
]: ...


@overload
def remote_method(
    dispatch: Literal[Dispatch.RANK_ZERO], *, phase: str = ..., balanced: bool = ..., stop: Stop = ...
) -> Callable[[Callable[Concatenate[Owner, Params], Answer]], Callable[Concatenate[Owner, Params], Future[Answer]]]: ...


@overload
def remote_method(
    dispatch: Literal[Dispatch.DP], *, phase: str = ..., balanced: bool = ..., stop: Stop = ...
) -> Callable[
    [Callable[Concatenate[Owner, Params], Answer | None]], Callable[Concatenate[Owner, Params], Future[Answer]]
]: ...


def remote_method(dispatch: Dispatch, *, phase: str = "", balanced: bool = False, stop: Stop = Stop.UNRELATED) -> Any:
    """Mark a method as callable from the controller (see `RemoteMethod`). On a rank it stays a plain method.

    A type checker sees the controller's side: a `Future` of all ranks' answers, of rank 0's, or of the joined record or
    dict of those that count. A rank whose answer does not count returns None.
    """

    def mark(method: Any) -> Any:
        method.remote_method = RemoteMethod(dispatch, phase, balanced, stop)
        return method

    return mark


def methods_of(kind: type) -> dict[str, RemoteMethod]:
    """Name -> mark of every method of a class."""
    members = inspect.getmembers(kind, inspect.isfunction)
    return {name: method.remote_method for name, method in members if hasattr(method, "remote_method")}
