"""This process's resident set, as the kernel counts it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path


def status_bytes(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def give_back() -> None:
    """Return freed heap to the system, so that the next measurement does not find it."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def peak_growth(run: Callable[[], object]) -> int:
    """Bytes by which the resident set exceeded, at its largest, what it was before `run`."""
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    run()
    return status_bytes("VmHWM") - before
