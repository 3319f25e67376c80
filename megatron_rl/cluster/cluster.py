"""The interface of a cluster: pools by name, each with the handles of its roles."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from megatron_rl.cluster.replicas import ReplicatedPool

Kind = TypeVar("Kind")


class Pool(Protocol):
    """A named set of ranks that form one world."""

    name: str

    def handle(self, role: str, kind: type[Kind]) -> Kind:
        """Return the handle of one of its roles, whose class is `kind`."""

    def host(self, kind: type[Kind]) -> Kind:
        """Return the handle of the methods of its hosts."""

    def raise_if_failed(self) -> None:
        """Raise if a rank has failed in a call that is not waited for."""


class Cluster(Protocol):
    """A context manager that starts and ends all pools; outside the `with` block there are none."""

    @property
    def pools(self) -> Mapping[str, Pool]:
        """Pools that are not replicated, by name."""

    @property
    def replicated(self) -> Mapping[str, ReplicatedPool]:
        """Replicated pools, by name."""

    def at_work(self) -> list[str]:
        """Return what the ranks of each pool are doing, with the pool's name where several are at work."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
