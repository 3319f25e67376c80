"""Programs that hang, that print without an end, and that leave children: they cost their limit and nothing more."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from megatron_rl.cluster.foreign_programs import answer_of


def running(words: str) -> bool:
    """Whether a process with these arguments is alive."""
    return any(
        words == " ".join(process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE
        for process in psutil.process_iter(["cmdline", "status"])
    )


@pytest.mark.parametrize(
    ("script", "text", "fault"),
    [
        ("echo out; echo err >&2", "out\nerr\n", ""),
        ("echo no; exit 3", "no\n", "sh exited with code 3"),
        ("kill -9 $$", "", "sh was killed by SIGKILL"),
        ("printf '\\377'", "\ufffd", ""),
        ("yes | head -c 100000", "y\n" * 500, "sh printed more than 1000 bytes"),
        ("while :; do echo y; done", "y\n" * 500, "sh printed more than 1000 bytes"),
        ("echo a; exec >&- 2>&-; sleep 6001", "a\n", "sh did not end within 1 s"),
        ("sleep 6002 & echo started", "started\n", ""),
        ("setsid sleep 6003 & echo away", "away\n", ""),
    ],
)
def test_an_answer_is_bounded_and_leaves_nothing(script: str, text: str, fault: str) -> None:
    """Would not catch a child that empties its environment and leaves the family."""
    started = time.monotonic()
    answer = answer_of(["sh", "-c", script], 1.0 if "6001" in script else 60.0, 1000)
    assert (answer.text, answer.fault) == (text, fault) and time.monotonic() - started < 50
    assert not any(running(f"sleep {number}") for number in (6001, 6002, 6003))


def test_a_program_that_cannot_be_started(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    answer = answer_of([str(tmp_path / "text")], 1.0)
    assert answer.fault == f"{tmp_path / 'text'} cannot be started: Permission denied"
