"""One pool of four ranks, shared by the tests of a module: starting Ray takes three seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_rl.controller.resource_pool import ResourcePool


@pytest.fixture(scope="module")
def pool() -> Iterator[ResourcePool]:
    with ResourcePool(2, 2, "cpu") as pool:
        yield pool
