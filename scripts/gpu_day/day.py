"""A part of the half hour on one GPU: some steps of `gpu_check`, or of its own, as a command of at most ten minutes.

Writes OUT/NAME.json. Code 0: every step that this machine has passed; 1: one failed; 77: none could run here, so that
nothing is proven.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import gpu_check  # noqa: E402
from fetch_wheels import CUMEM, WHEELS  # noqa: E402
from listed import as_on_the_machine  # noqa: E402

STEPS = Path(__file__).parent / "steps"
REHEARSED = Path(__file__).parent / "rehearsed_step.py"
PASSED, FAILED, SKIPPED = 0, 1, 77
PART_S = 600
"""Seconds that a part may take, all its steps together."""
REHEARSED_S = 3600
"""Seconds that a rehearsed step may take: a machine may be busy, and a step takes at most a few CPU minutes."""


def of_gpu_check(*names: str) -> dict[str, Path]:
    """Steps of `gpu_check` by name. Raises KeyError for one that there is not."""
    return {name: gpu_check.steps()[name] for name in names}


def part(name: str, files: Mapping[str, Path], limit_s: float, about: str | None, uses_cumem: bool = False) -> int:
    """Run the command line of a part; return its exit code. limit_s: seconds that each of its steps may take."""
    assert limit_s * len(files) <= PART_S, f"{name} could take {limit_s * len(files):g} s"
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small sizes, to try the command itself; always on a CPU")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU: a GPU's sizes, the machine's packages")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu_day"), help="folder for NAME.json")
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="what fetch_wheels.py has fetched, to be installed")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    out = given.out / f"{name}.json"
    with tempfile.TemporaryDirectory(prefix="gpu_day_") as scratch:
        if given.rehearse:
            os.environ |= as_on_the_machine(Path(scratch))
            results = gpu_check.run_all(files, "cuda", False, REHEARSED_S, out, before=[str(REHEARSED)])
        else:
            folders = installed(given.wheels, Path(scratch)) if given.device == "cuda" else []
            folders += [str(given.wheels / CUMEM)] if uses_cumem and (given.wheels / CUMEM).is_dir() else []
            if folders:
                path = [*folders, *filter(None, [os.environ.get("PYTHONPATH")])]
                os.environ["PYTHONPATH"] = os.pathsep.join(path)
            results = gpu_check.run_all(files, given.device, given.small or given.device == "cpu", limit_s, out)
    return code_of(results)


def installed(wheels: Path, scratch: Path) -> list[str]:
    """Install the wheels into a folder of this run; return it, none where there are no wheels."""
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        return []
    target = scratch / "site"
    options = ["--quiet", "--no-index", "--no-deps", "--no-cache-dir", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *files], check=True)
    return [str(target)]


def code_of(results: Mapping[str, Mapping[str, Any]]) -> int:
    """The exit code for outcomes of steps."""
    outcomes = {said["outcome"] for said in results.values()}
    if "failed" in outcomes:
        return FAILED
    return PASSED if "passed" in outcomes else SKIPPED
