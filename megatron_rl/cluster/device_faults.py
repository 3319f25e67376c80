"""Errors of a broken GPU, as distinct from errors of code, and the memory that a killed rank leaves on its GPU."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from megatron_rl.cluster.launcher import VISIBLE_GPUS
from megatron_rl.cluster.programs import answer_of
from megatron_rl.errors import DeviceFault

RAISED_BY_CUDA = ("AcceleratorError", "RuntimeError")
"""Names of the exceptions that torch has for what CUDA and its libraries report."""
HARDWARE = re.compile(
    r"uncorrectable (?:ecc|nvlink)(?: error)?|nvlink or a hardware error|hardware stack error|\bxid\b"
    r"|fallen off the bus|no cuda gpus are available|cuda-capable device\(s\) is/are busy or unavailable",
    re.IGNORECASE,
)
"""Reports that no code causes."""
SUSPECTED = re.compile(
    r"unspecified launch failure|illegal memory access|illegal instruction"
    r"|cu(?:blas|dnn|solver)_status_execution_failed",
    re.IGNORECASE,
)
"""Reports of broken GPUs and of wrong kernels alike: on another GPU, in the same step, it is the code."""

EMPTY_BYTES = 1 << 30
"""Memory in use on a GPU without ranks: what the driver keeps, and contexts."""
FREE_LIMIT_S, LOOK_S, STEADY_LOOKS = 60.0, 1.0, 5
"""Seconds to wait for memory, between two looks, and looks without a change after which it is another program's."""
ANSWER_S = 30.0
NVIDIA_SMI = "nvidia-smi"


def fault_of(error_type: str, message: str) -> DeviceFault | None:
    """Return the fault of a GPU that a rank's exception reports; None if the error is one of code."""
    if error_type not in RAISED_BY_CUDA:
        return None
    for pattern, is_certain in ((HARDWARE, True), (SUSPECTED, False)):
        if found := pattern.search(message):
            return DeviceFault(found.group().lower(), is_certain)
    return None


def wait_for_memory(variables: Mapping[str, str], folder: Path | None = None) -> None:
    """Wait until what earlier ranks of the run held on this rank's GPU is free; at once on CPUs and in a first start.

    The kernel frees the memory of a killed process some time after the kill. folder: of the run on this node, where a
    file names each GPU that has had a rank; None: of temporary files. Call it before CUDA is used.
    """
    gpu = variables.get(VISIBLE_GPUS, "")
    if not gpu or "," in gpu:
        return
    mark = (folder or Path(tempfile.gettempdir())) / f"gpu_{gpu.replace('/', '_')}"
    if not mark.exists():
        mark.touch()
        return
    deadline, held = time.monotonic() + FREE_LIMIT_S, list[int]()
    while (used := used_bytes(gpu)) is not None and used > EMPTY_BYTES:
        held.append(used)
        is_steady = len(held) > STEADY_LOOKS and len(set(held[-STEADY_LOOKS:])) == 1
        if is_steady or time.monotonic() > deadline:
            print(f"GPU {gpu} has {used / 1e9:.1f} GB in use before its rank starts again", file=sys.stderr)
            return
        time.sleep(LOOK_S)


def used_bytes(gpu: str) -> int | None:
    """Return the bytes in use on a GPU, an index or UUID, as the driver reports; None where it cannot be asked."""
    if shutil.which(NVIDIA_SMI) is None:
        return None
    query = [NVIDIA_SMI, "-i", gpu, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    text = answer_of(query, ANSWER_S).text.strip()
    return int(text) << 20 if text.isdecimal() else None
