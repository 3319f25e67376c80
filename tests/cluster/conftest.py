from __future__ import annotations

from collections.abc import Iterator

import pytest
from launchers import LOCAL, RAY, SHARED_RAY, make_launcher

from megatron_rl.cluster.launcher import Launcher

MODULES = ("held_worker", "toy_worker", "fragile_worker", "replica_worker", "sleepers")


@pytest.fixture(scope="session")
def ends_ray() -> Iterator[None]:
    yield
    SHARED_RAY.end()


@pytest.fixture(scope="module")
def running_ray(ends_ray: None) -> None:
    """The shared Ray runs."""
    SHARED_RAY.start()


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
