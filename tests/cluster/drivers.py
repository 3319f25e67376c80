"""Drivers in processes of their own, which tests kill or whose processes they kill."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def running(script: str, *arguments: str, stdout: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[str]]:
    """Run a script of this folder in a session of its own, and kill it at the end.

    Its stderr is a pipe, and stdout may be one. Its home folder does not exist and cannot be made.
    """
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    driver = subprocess.Popen(
        [sys.executable, folder / script, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "HOME": "/proc/none"},
        start_new_session=True,
    )
    try:
        yield driver
    finally:
        driver.kill()
        driver.wait()
