"""The bench of steps runs as its page says, without TRL's environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sweeps import WEEKLY

REPOSITORY = Path(__file__).parents[2]

pytestmark = [*WEEKLY, pytest.mark.timeout(300)]


def test_a_step_is_timed() -> None:
    """The tiny model, one round, here in one process: seconds, CPU seconds, phases and parts. Would not catch a wrong
    one.
    """
    command = [sys.executable, "scripts/bench/step.py", "--sizes", "tiny", "--rounds", "1", "--threads", "1"]
    done = subprocess.run([*command, "--arms", "parts"], cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "s; CPU " in done.stdout and "timing_s/update_actor" in done.stdout
    parts = {line[2:26].strip(): float(line.split()[-2]) for line in done.stdout.splitlines() if line.endswith("%")}
    assert parts.keys() >= {"forward", "sampler", "update, backward"} and sum(map(bool, parts.values())) > 20, parts
