"""Oldest NVIDIA driver for the CUDA version that torch was built for, and that version. No torch is imported."""

from __future__ import annotations

import importlib.util
import re
from contextlib import suppress
from pathlib import Path

LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA's major version -> the first driver branch for Linux that runs programs of any of its minor versions (NVIDIA's
CUDA release notes, minor version compatibility)."""
PAGE = "docs/scale/gpu.md"


def torch_cuda() -> str:
    """Return the CUDA version that torch was built for, from its version file; "" for none, or without torch."""
    torch_spec = importlib.util.find_spec("torch")
    if torch_spec is None or torch_spec.origin is None:
        return ""
    with suppress(OSError, ValueError):
        text = Path(torch_spec.origin).with_name("version.py").read_text()
        stated = re.search(r"^cuda\b.*= *['\"]([\d.]+)['\"]", text, re.MULTILINE)
        return stated.group(1) if stated else ""
    return ""


def least_driver(cuda: str, driver: str) -> int | None:
    """Return the first driver branch that CUDA needs where `driver` is older; None where it will do, or nothing is
    known. cuda, driver: versions such as "13.0" and "570.86.15".
    """
    majors = [re.match(r"\d{1,6}", version) for version in (cuda, driver)]
    if majors[0] is None or majors[1] is None:
        return None
    least = LEAST_DRIVER.get(int(majors[0].group()))
    return least if least is not None and int(majors[1].group()) < least else None


def newer_driver(cuda: str, least: int) -> str:
    """Return advice about a driver that is too old."""
    major = cuda.split(".")[0]
    return f"a driver of branch {least} or newer, which CUDA {major} needs ({PAGE}), or a torch for an older CUDA"
