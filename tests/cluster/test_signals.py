"""Real signals to a driver that could save: one, two, too late, and while it cleans up."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import pytest

from megatron_rl.cluster.signals import graceful_signals

pytestmark = pytest.mark.timeout(60)

LONG = 600.0
TOLD = "a second signal ends it"
"""What the first signal is answered with."""


def heeding(hang_up: bool) -> Callable[[], object]:
    """Makes a child start with SIGHUP as it is by default, or ignored, as `nohup` does."""
    return lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL if hang_up else signal.SIG_IGN)


def drive(
    grace: float | str, step_s: float, cleaning_s: float, *signals: tuple[str | float, int], hang_up: bool = True
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a driver that gets each signal once it has said a text, or after so many seconds
    where it says nothing: two signals that come as one may reach two threads, of which one tells nobody.
    """
    script = Path(__file__).with_name("stopping_driver.py")
    command = [sys.executable, script, str(grace), str(step_s), str(cleaning_s)]
    with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=output, stderr=errors, preexec_fn=heeding(hang_up)) as driver:
            try:
                for before, number in signals:
                    if isinstance(before, float):
                        time.sleep(before)
                    else:
                        wait_for(before, driver, output, errors)
                    driver.send_signal(number)
                driver.wait(50)
            finally:
                driver.kill()
        return driver.returncode, said(output), said(errors)


def said(file: IO[str]) -> str:
    """All that a process has written to a file."""
    return os.pread(file.fileno(), 1 << 16, 0).decode()


def wait_for(text: str, process: subprocess.Popen, *files: IO[str]) -> None:
    """Until a process has written a text to one of its files."""
    while not any(text in said(file) for file in files):
        assert process.poll() is None, [said(file) for file in files]
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")])
def test_the_first_signal_is_a_request(number, name):
    """The step ends as if nothing had been, and the user is told. Would not catch a signal to a worker."""
    code, output, errors = drive(100, 0.3, 0, ("step", number))
    seconds = re.search(rf"{name} (\d+)\ncleaning up\ncleaned up\nsaved\n$", output)
    assert code == 20 and 50 < int(seconds[1]) <= 100
    assert errors.splitlines() == [
        "",
        f"{name}: the run saves and stops within 100 s (trainer.stop_grace_s); a second signal ends it now",
    ]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (signal.SIGTERM, signal.SIGTERM, 143),
        (signal.SIGINT, signal.SIGTERM, 143),
        (signal.SIGTERM, signal.SIGINT, 130),
        (signal.SIGINT, signal.SIGINT, 130),
    ],
)
def test_the_second_signal_leaves_at_once(first, second, expected):
    """In the middle of a step. Would not catch two signals that come as one, which the system does not tell apart."""
    code, output, _ = drive(LONG, LONG, 0, ("step", first), (TOLD, second))
    assert code == expected and output == "step\ncleaning up\ncleaned up\n"


@pytest.mark.parametrize("later", [(), (signal.SIGHUP, signal.SIGHUP), (signal.SIGTERM,)], ids=["1", "3", "login"])
def test_a_closed_terminal_is_one_request(later):
    """However many signals it is made of. Would not catch a process of the terminal that Ray started."""
    code, output, errors = drive(100, 0.3, 0, ("step", signal.SIGHUP), *[(0.1, one) for one in later])
    assert code == 20 and output.endswith("cleaned up\nsaved\n")
    assert errors.startswith("\nSIGHUP: the run saves and stops within 100 s (trainer.stop_grace_s)\n")
    code, output, _ = drive(LONG, LONG, 0, ("step", signal.SIGTERM), (TOLD, signal.SIGHUP), (0.2, signal.SIGTERM))
    assert code == 143 and output == "step\ncleaning up\ncleaned up\n"


def test_nohup_keeps_a_hang_up_away():
    """Whether the run can save or not. Would not catch a shell that ignores it only later."""
    code, output, _ = drive(100, 0.3, 0, ("step", signal.SIGHUP), (0.2, signal.SIGTERM), hang_up=False)
    assert code == 20 and "SIGTERM" in output
    code, _, _ = drive("none", LONG, 0, ("step", signal.SIGHUP), (0.2, signal.SIGTERM), hang_up=False)
    assert code == 143


def test_a_program_that_only_waits_exits_at_a_closed_terminal():
    """Once, though it is told twice; and not under `nohup`. Would not catch a program that does not call it."""
    program = (
        "import time; from megatron_rl.cluster.signals import exit_on_signals; exit_on_signals()\n"
        "try:\n    print('step', flush=True); time.sleep(600)\nfinally:\n    time.sleep(0.5); print('ended')"
    )
    for hang_up, signals, expected in ((True, (signal.SIGHUP, signal.SIGHUP), 129), (False, (1, 15), 143)):
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heeding(hang_up)) as waiting:
            assert waiting.stdout.readline() == "step\n"
            for number in signals:
                waiting.send_signal(number)
                time.sleep(0.2)
            assert waiting.communicate(timeout=50)[0] == "ended\n" and waiting.returncode == expected


@pytest.mark.parametrize("grace", [0, 0.3])
def test_the_end_of_the_grace_leaves(grace):
    """A step that is too long. Would not catch a call that holds the interpreter."""
    code, output, _ = drive(grace, LONG, 0, ("step", signal.SIGTERM))
    assert code == 22 and "cleaned up\nthe run could not save within trainer.stop_grace_s=" in output
    assert "SIGTERM" in output


def test_cleaning_up_after_saving_is_not_interrupted():
    """The grace ends and another SIGTERM comes in the meantime. Would not catch Ctrl-C, which does interrupt."""
    code, output, _ = drive(1, 0.05, 2, ("step", signal.SIGTERM), ("cleaning up", signal.SIGTERM))
    assert code == 20 and "cleaned up" in output


@pytest.mark.parametrize(
    ("signals", "expected"),
    [([signal.SIGTERM, signal.SIGTERM], 143), ([signal.SIGINT], 130), ([signal.SIGHUP, signal.SIGHUP], 129)],
    ids=["SIGTERM", "SIGINT", "SIGHUP"],
)
def test_a_run_that_saves_nothing_leaves_at_once(signals, expected):
    """With one line; a second SIGTERM does not disturb. Would not catch what the step leaves half done."""
    code, output, errors = drive("none", LONG, 0.3, *zip(("step", "cleaning up"), signals, strict=False))
    assert (code, output) == (expected, "step\ncleaning up\ncleaned up\n")
    why = "the run ends now, as it saves no checkpoints (trainer.save_freq)"
    assert errors == f"\n{signal.Signals(signals[0]).name}: {why}\n"


@pytest.mark.parametrize(
    ("number", "code", "expected"),
    [(signal.SIGINT, None, 130), (signal.SIGTERM, None, 143), (signal.SIGHUP, None, 129), (signal.SIGTERM, 21, 21)],
)
def test_a_signal_among_imports_ends_the_process_with_one_line(number, code, expected):
    """Although whoever is imported catches everything. Would not catch a library that installs a handler of its own."""
    program = (
        "import signal, time\nfrom megatron_rl.cluster.signals import quit_on_signals, restore_signals\n"
        "before = [signal.getsignal(number) for number in (1, 2, 15)]\nquit_on_signals(1)\nrestore_signals()\n"
        f"assert [signal.getsignal(number) for number in (1, 2, 15)] == before\nquit_on_signals()\n"
        f"quit_on_signals({code})\nprint('importing', flush=True)\n"
        "while True:\n    try: time.sleep(600)\n    except BaseException: pass"
    )
    with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, stdout=output, stderr=errors, preexec_fn=heeding(True)) as starting:
            try:
                wait_for("importing", starting, output, errors)
                starting.send_signal(number)
                assert starting.wait(50) == expected
            finally:
                starting.kill()
        why = "stopped while the command was starting; no process was started, and nothing was written"
        assert said(errors) == f"\n{signal.Signals(number).name}: {why}\n"


@pytest.mark.timeout(60, method="thread")  # the other method has a timer of its own
def test_handlers_and_timer_are_put_back():
    """Also after an error. Would not catch a handler that was installed from C."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    for grace in (None, 5.0):
        with pytest.raises(KeyError), graceful_signals(grace) as stop:
            assert not stop.is_set and stop.remaining_s() == float("inf")
            if grace is not None:
                signal.raise_signal(signal.SIGTERM)
                assert stop.is_set and 4 < stop.remaining_s() <= 5 and signal.getitimer(signal.ITIMER_REAL)[0] > 4
            raise KeyError
        assert [signal.getsignal(number) for number in numbers] == before
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
