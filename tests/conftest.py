"""What all tests rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator

import pytest
from hypothesis import settings
from weekly_runs import WeeklyRuns

from megatron_rl.cluster.loading import without_collections

# A shell starts background jobs with Ctrl-C ignored, which every process below would inherit; some tests send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Several tests share the cores: a thread that waits for its siblings must not spin, or a model of a few kilobytes takes
# a hundred times as long as alone. Read by OpenMP when torch is loaded, here and in every process that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# What a busy machine makes of an example's milliseconds is no fault of the code.
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")

# Tests start hundreds of processes, each of which would compile this package anew; and each worker all files of tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


INSTRUMENTS = ("gpu_contract", "profile", "rehearse")
"""Folders of tests of what measures and rehearses runs; `make test-instruments` has all tests that are so marked."""


def pytest_configure(config: pytest.Config) -> None:
    """Date weekly tests, in the process that hears of every outcome."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(WeeklyRuns())


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Packages -> the interpreter of an environment with them, made once; tests skip where pip cannot install them."""
    made: dict[str, str] = {}

    def of(packages: str) -> str:
        if packages not in made:
            folder = tmp_path_factory.mktemp("packages") / "environment"
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            pip = [folder / "bin/python", "-m", "pip", "install", "-q", *packages.split()]
            installed = subprocess.run(pip, capture_output=True, text=True)
            if installed.returncode:
                pytest.skip(f"pip cannot install {packages}: {installed.stderr[-200:]}")
            made[packages] = str(folder / "bin/python")
        return made[packages]

    return of


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of these folders, before `-m` chooses."""
    for item in items:
        if item.path.parent.name in INSTRUMENTS:
            item.add_marker(pytest.mark.instrument)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What all test files import stays, and is never looked through for garbage."""
    with without_collections():
        return (yield)
