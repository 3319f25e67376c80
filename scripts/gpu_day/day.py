"""A part of the 45 minutes on one GPU: some steps of `gpu_check`, or of its own, as a command of at most ten minutes.

Writes OUT/NAME.json. Code 0: every step that this machine has passed; 1: one failed; 77: none could run here, so that
nothing is proven.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import gpu_check  # noqa: E402

STEPS = Path(__file__).parent / "steps"
PASSED, FAILED, SKIPPED = 0, 1, 77
PART_S = 600
"""Seconds that a part may take, all its steps together."""


def of_gpu_check(*names: str) -> dict[str, Path]:
    """Steps of `gpu_check` by name. Raises KeyError for one that there is not."""
    return {name: gpu_check.steps()[name] for name in names}


def part(name: str, files: Mapping[str, Path], limit_s: float, about: str | None) -> int:
    """Run the command line of a part; return its exit code. limit_s: seconds that each of its steps may take."""
    assert limit_s * len(files) <= PART_S, f"{name} could take {limit_s * len(files):g} s"
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small sizes, to try the command itself; always on a CPU")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu_day"), help="folder for NAME.json")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    small = given.small or given.device == "cpu"
    return code_of(gpu_check.run_all(files, given.device, small, limit_s, given.out / f"{name}.json"))


def code_of(results: Mapping[str, Mapping[str, Any]]) -> int:
    """The exit code for outcomes of steps."""
    outcomes = {said["outcome"] for said in results.values()}
    if "failed" in outcomes:
        return FAILED
    return PASSED if "passed" in outcomes else SKIPPED
