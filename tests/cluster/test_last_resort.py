"""A driver that hangs after a signal ends all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import time
from megatron_rl.cluster.signals import LastResort
resort = LastResort()
resort.arm(600, 1)
resort.arm({seconds}, 22)
{then}
time.sleep({sleep})
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("seconds", "then", "sleep", "code"),
    [(0.2, "", 30, 22), (0.2, "resort.stand_down()", 2, 0), (600, "", 1, 0)],
    ids=["late", "stood down", "in time"],
)
def test_the_process_ends_at_the_deadline(seconds: float, then: str, sleep: float, code: int) -> None:
    """The latest order counts. Would not catch a C function that keeps the interpreter for ever."""
    script = SCRIPT.format(seconds=seconds, then=then, sleep=sleep)
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=40, check=False)
    assert finished.returncode == code, finished.stderr
    assert ("the run ends now" in finished.stderr) == (code == 22)
