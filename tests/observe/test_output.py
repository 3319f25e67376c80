"""Output that nobody reads: the program goes on, and its exit code is its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PROGRAM = """
import os, sys
from megatron_rl.observe.console import drop_unread_output, lost_output
drop_unread_output()
from rich.console import Console
open({folder!r} + "/first", "w").write("the file's own")
for number in range(3):
    print("line", number, "x" * 9000, flush=True)
    Console().print("rich", number)
    Console(stderr=True).print("error", "\\udcff\\u00e4")
os.system("echo from a child >&2")
open({folder!r} + "/lost", "w").write(str(sys.stdout and lost_output(sys.stdout)))
sys.exit(5)
"""


@pytest.mark.parametrize(
    ("arguments", "redirection", "lost"),
    [
        ("", "| head -c 1", "None"),
        ("-u", "| head -c 1", "None"),
        ("", "2>&1 | head -c 1", "None"),
        ("", ">&-", "None"),
        ("", "<&- >&- 2>&-", "None"),
        ("", "> /dev/full 2> /dev/full", "[Errno 28] No space left on device"),
    ],
)
def test_nothing_that_is_printed_can_fail(tmp_path, arguments, redirection, lost):
    """Pipes, closed descriptors, a full disk. Would not catch a library that writes past Python's streams."""
    program = PROGRAM.format(folder=str(tmp_path))
    finished = subprocess.run(
        ["bash", "-c", f'"$0" {arguments} -c "$1" {redirection}; exit "${{PIPESTATUS[0]}}"', sys.executable, program],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 5, finished.stderr
    assert "Traceback" not in finished.stderr and "Exception ignored" not in finished.stderr
    assert (tmp_path / "first").read_text() == "the file's own"
    assert (tmp_path / "lost").read_text() == lost


def test_what_can_be_printed_is_printed(tmp_path):
    """In its order, to a file; what the encoding lacks as an escape. Would not catch colours on a terminal."""
    program = PROGRAM.format(folder=str(tmp_path))
    finished = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin"},
    )
    lines = [text for number in range(3) for text in (f"line {number} {'x' * 9000}", f"rich {number}")]
    assert (finished.returncode, finished.stdout.splitlines()) == (5, lines)
    assert finished.stderr.splitlines() == ["error \\udcff\\xe4"] * 3 + ["from a child"]
