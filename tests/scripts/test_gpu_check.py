"""The first ten minutes on a GPU, as far as a CPU has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


def check(tmp_path: Path, *options: str, timeout: float) -> tuple[int, str, dict]:
    """Code, table and what was written; no temporary file is left."""
    out, scratch = tmp_path / "found.json", tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--out", str(out), *options]
    variables = {**os.environ, "TMPDIR": str(scratch)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=variables)
    assert not list(scratch.iterdir())
    return done.returncode, done.stdout + done.stderr, json.loads(out.read_text()) if out.exists() else {}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.exhaustive
def test_steps_pass_or_say_why_not(tmp_path: Path) -> None:
    """One that a CPU has, one that it has not. Would not catch what only a GPU can show."""
    code, text, found = check(tmp_path, "--only", "rounds,streams", timeout=100)
    assert code == 0, text
    outcomes = {name: (said["outcome"], said["message"]) for name, said in found["steps"].items()}
    assert outcomes == {"rounds": ("passed", ""), "streams": ("not run", "a CPU has no streams")}
    assert len(found["steps"]["rounds"]["figures"]["rounds"]) == 3 and "torch" in found["versions"]
    assert "not run" in text and "a CPU has no streams" in text


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_step_that_takes_too_long_fails_alone(tmp_path: Path) -> None:
    """The next one runs, each is said as it begins, and the code says that something failed; a CPU takes small sizes.

    Would not catch a step that leaves processes.
    """
    code, text, found = check(tmp_path, "--only", "streams", "--limit", "0.2", timeout=50)
    assert code == 1 and "no end within 0.2 s" in text and found["steps"]["streams"]["outcome"] == "failed"
    assert text.startswith("step 1 of 1: streams, at most 0.2 s\n  failed after ") and found["small"]


def test_unknown_steps_are_refused(tmp_path: Path) -> None:
    """With those that there are. Would not catch a step that is listed and empty."""
    code, text, found = check(tmp_path, "--only", "everything", timeout=50)
    assert code == 2 and "no step everything" in text and "rollout_bfloat16" in text and not found


@pytest.mark.exhaustive
@pytest.mark.weekly
@pytest.mark.timeout(900)
def test_every_step_that_a_cpu_has(tmp_path: Path) -> None:
    """With vLLM, too; streams, graphs and contexts need a GPU. Would not catch a figure that is wrong on both sides."""
    code, text, found = check(tmp_path, timeout=880)
    assert code == 0, text
    not_passed = [name for name, said in found["steps"].items() if said["outcome"] != "passed"]
    assert not_passed == ["streams", "rollout_graphs", "context", "mapped_graphs"]
