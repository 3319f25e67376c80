"""Both launchers, for tests of what stands above them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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


@contextmanager
def reserved(launcher: Launcher, num_ranks: int, num_nodes: int = 1) -> Iterator[Ranks]:
    """Places on an entered launcher."""
    with launcher.reserve(PoolSize(num_nodes, num_ranks), ()) as ranks:
        yield ranks
