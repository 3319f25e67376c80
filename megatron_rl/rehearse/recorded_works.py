"""Works of collectives and messages: reductions of a group's methods, and whether their works are waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch._C._distributed_c10d import ProcessGroup, Work

METHODS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "alltoall", "alltoall_base"),
    *("all_to_all_single", "allgather", "allgather_coalesced", "_allgather_base", "all_gather_single"),
    *("all_gather_single_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter", "reduce_scatter"),
    *("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("reduce_scatter_tensor_coalesced", "send", "recv"),
)
"""Of a process group, that return a work."""


class WorkNotes(Protocol):
    """Takes notes of works."""

    def begin_call(self, reduction: str) -> None:
        """Note that a group's method begins. reduction: SUM, MAX and so on; "" of methods that reduce nothing."""

    def begin_work(self) -> int:
        """Return a number for the work that the method has begun."""

    def wait_for_work(self, number: int) -> None:
        """Note that something waits for the work."""


class RecordedWork:
    """A work that reports when it is waited for. Has all methods of torch's."""

    def __init__(self, work: Any, number: int, notes: WorkNotes) -> None:
        self._work, self._number, self._notes = work, number, notes

    def wait(self, *args: Any, **options: Any) -> Any:
        """Wait as torch's work does."""
        self._notes.wait_for_work(self._number)
        return self._work.wait(*args, **options)

    def synchronize(self) -> None:
        """Let the current stream wait."""
        self._notes.wait_for_work(self._number)

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Return True: there are no other ranks."""
        self._notes.wait_for_work(self._number)
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def record_works(notes: Callable[[], WorkNotes]) -> None:
    """Report all works of this process to `notes`. Applied once, not undone."""
    for name in METHODS:
        setattr(ProcessGroup, name, _recorded(getattr(ProcessGroup, name), notes))


def _recorded(method: Any, notes: Callable[[], WorkNotes]) -> Any:
    def call(group: ProcessGroup, *args: Any, **options: Any) -> Any:
        own = notes()
        own.begin_call(_reduction_of((*args, *options.values())))
        work = method(group, *args, **options)
        return RecordedWork(work, own.begin_work(), own) if isinstance(work, Work) else work

    return call


def _reduction_of(arguments: tuple[Any, ...]) -> str:
    """Return the name of the reduction among a method's arguments, which its options may have."""
    for argument in arguments:
        asked = getattr(argument, "reduceOp", None) if not isinstance(argument, (list, int)) else None
        if asked is not None:
            return str(getattr(asked, "op", asked)).rsplit(".", 1)[-1]
    return ""
