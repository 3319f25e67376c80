"""The bench of held columns runs as its page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from sweeps import WEEKLY

REPOSITORY = Path(__file__).parents[2]

pytestmark = [*WEEKLY, pytest.mark.dist, pytest.mark.timeout(300)]


@pytest.mark.parametrize("options", [("--mib", "64"), ("--sweep",)], ids=["one size", "sweep"])
def test_both_ways_are_measured(options: tuple[str, ...]) -> None:
    """Without Ray, one round. Held, the driver grows by less than a fifth of what it does otherwise; the bench itself
    compares numbers. Would not catch seconds that mean nothing.
    """
    command = [sys.executable, "scripts/bench/held_columns.py", "--rounds", "1", "--launchers", "local", *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    grown = re.findall(r"MiB (held|through the driver) *: .* driver (\S+) ", done.stdout)
    through, held = (float(dict(grown[-2:])[arm]) for arm in ("through the driver", "held"))
    assert held < max(1.0, through / 5), done.stdout
