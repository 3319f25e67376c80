"""Ranks of a Ray cluster: Ray, started or joined, and the reservations of the pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from megatron_rl.cluster.ray_ranks import RayRanks
from megatron_rl.cluster.ray_session import RaySession
from megatron_rl.config.roles import PoolSize


class RayLauncher:
    """Starts ranks through Ray. num_ranks: of all pools; a Ray started here has a CPU for each.

    modules, variables: see `Supervision`; every node has a supervisor. Raises the errors of `RaySession`.
    """

    def __init__(
        self,
        num_ranks: int,
        device_kind: str,
        modules: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._device_kind, self._modules, self._variables = device_kind, modules, dict(variables or {})
        self._session = RaySession(num_ranks, modules, self._variables)

    def __enter__(self) -> Self:
        self._session.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.__exit__(kind, error, trace)

    def reserve(self, size: PoolSize, others: Sequence[PoolSize] = ()) -> RayRanks:
        """Return the places, to be entered."""
        return RayRanks(
            size,
            self._device_kind,
            self._session,
            others=others,
            modules=self._modules,
            variables=self._variables,
        )
