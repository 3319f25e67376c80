"""Both launchers, for tests of what stands above them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from megatron_rl.cluster.launcher import Launcher, Ranks
from megatron_rl.cluster.local_launcher import LocalLauncher
from megatron_rl.config.roles import PoolSize

LOCAL, RAY = "local", "ray"
BOTH = [LOCAL, pytest.param(RAY, marks=pytest.mark.exhaustive)]
"""Parameters of a fixture."""


def make_launcher(kind: str, modules: Sequence[str] = (), num_ranks: int = 16) -> Launcher:
    """modules: that ranks are forked with."""
    if kind == LOCAL:
        return LocalLauncher("cpu", modules)
    from megatron_rl.cluster.ray_launcher import RayLauncher

    return RayLauncher(num_ranks, "cpu", modules)


class SharedRay:
    """One Ray for all tests of a process that kill none of its processes; started when it is first needed."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._is_open = False

    def start(self) -> None:
        """No-op where it runs."""
        if not self._is_open:
            from megatron_rl.cluster.ray_session import RaySession

            self._open.enter_context(RaySession(16))
            self._is_open = True

    def end(self) -> None:
        """For tests of Ray's own start; no-op where it does not run."""
        self._open.close()
        self._is_open = False


SHARED_RAY = SharedRay()


@contextmanager
def reserved(launcher: Launcher, num_ranks: int, num_nodes: int = 1) -> Iterator[Ranks]:
    """Places on an entered launcher."""
    with launcher.reserve(PoolSize(num_nodes, num_ranks), ()) as ranks:
        yield ranks
