from __future__ import annotations

from collections.abc import Iterator

import pytest
from launchers import LOCAL, RAY, make_launcher

from megatron_rl.cluster.launcher import Launcher

MODULES = ("toy_worker", "fragile_worker", "replica_worker", "sleepers")


@pytest.fixture(scope="session")
def running_ray() -> Iterator[None]:
    """One Ray for all tests of a session that kill none of its processes."""
    from megatron_rl.cluster.ray_session import RaySession

    with RaySession(16):
        yield


@pytest.fixture(scope="module")
def kind() -> str:
    """The kind of a module's launcher; other modules have a fixture of this name."""
    return LOCAL


@pytest.fixture(scope="module")
def launcher(request: pytest.FixtureRequest, kind: str) -> Iterator[Launcher]:
    """An entered launcher."""
    if kind == RAY:
        request.getfixturevalue("running_ray")
    with make_launcher(kind, MODULES) as launcher:
        yield launcher
