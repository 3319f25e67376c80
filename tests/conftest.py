"""What all tests rely on."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import time
from collections.abc import Generator

import pytest

from megatron_rl.cluster.loading import without_collections

STARTED = time.monotonic()

# A shell starts background jobs with Ctrl-C ignored, which every process below would inherit; some tests send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Several tests share the cores: a thread that waits for its siblings must not spin, or a model of a few kilobytes takes
# a hundred times as long as alone. Read by OpenMP when torch is loaded, here and in every process that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Tests start hundreds of processes, each of which would compile this package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What all test files import stays, and is never looked through for garbage."""
    with without_collections():
        return (yield)


def pytest_addoption(parser: pytest.Parser) -> None:
    """For sweeps that have less time than they take (`.ci/run`): docs/testing.md."""
    group = parser.getgroup("sweeps")
    group.addoption(
        "--begin-within", type=float, default=math.inf, metavar="MINUTES", help="skip tests that would begin later"
    )
    group.addoption("--file-order", default="", metavar="TEXT", help="run the files in an order that follows from TEXT")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests of a file keep their order, and so their fixtures."""
    if text := config.getoption("--file-order"):
        items.sort(key=lambda item: hashlib.sha256((text + item.nodeid.partition("::")[0]).encode()).digest())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that has begun is not stopped."""
    minutes = item.config.getoption("--begin-within")
    if time.monotonic() - STARTED > 60 * minutes:
        pytest.skip(f"would begin later than {minutes:g} minutes after the first")
