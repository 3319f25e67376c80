"""Real signals to a driver that could save: one, two, too late, and while it cleans up."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.controller.signals import graceful_signals

pytestmark = pytest.mark.timeout(60)

LONG = 600.0


def drive(grace: float | str, step_s: float, cleaning_s: float, *signals: tuple[float, int]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a driver that gets each signal so many seconds after the one before."""
    script = Path(__file__).with_name("stopping_driver.py")
    command = [sys.executable, script, str(grace), str(step_s), str(cleaning_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout.readline() == "step\n"
            for seconds, number in signals:
                time.sleep(seconds)
                driver.send_signal(number)
            output, errors = driver.communicate(timeout=20)
        finally:
            driver.kill()
    return driver.returncode, output, errors


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")])
def test_the_first_signal_is_a_request(number, name):
    """The step ends as if nothing had been, and the user is told. Would not catch a signal to a worker."""
    code, output, errors = drive(100, 0.5, 0, (0.1, number))
    assert code == 20 and output.endswith(f"{name} 100\ncleaned up\nsaved\n")
    assert errors.splitlines() == [
        "",
        f"{name}: the run saves and stops within 100 s (trainer.stop_grace_s); a second signal ends it at once",
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
    code, output, _ = drive(LONG, LONG, 0, (0, first), (0.3, second))
    assert code == expected and output == "cleaned up\n"


@pytest.mark.parametrize("grace", [0, 0.3])
def test_the_end_of_the_grace_leaves(grace):
    """A step that is too long. Would not catch a call that holds the interpreter."""
    code, output, _ = drive(grace, LONG, 0, (0, signal.SIGTERM))
    assert code == 22 and output.startswith("cleaned up\nthe run could not save within trainer.stop_grace_s=")
    assert "SIGTERM" in output


def test_cleaning_up_after_saving_is_not_interrupted():
    """The grace ends and another SIGTERM comes in the meantime. Would not catch Ctrl-C, which does interrupt."""
    code, output, _ = drive(1, 0.2, 2, (0.1, signal.SIGTERM), (0.6, signal.SIGTERM))
    assert code == 20 and "cleaned up" in output


@pytest.mark.parametrize(
    ("signals", "expected"),
    [([signal.SIGTERM, signal.SIGTERM], 143), ([signal.SIGINT], 130)],
    ids=["SIGTERM", "SIGINT"],
)
def test_a_run_that_saves_nothing_leaves_at_once(signals, expected):
    """A second SIGTERM does not disturb. Would not catch what the step leaves half done."""
    assert drive("none", LONG, 0.5, *[(0.2, number) for number in signals]) == (expected, "cleaned up\n", "")


@pytest.mark.timeout(60, method="thread")  # the other method has a timer of its own
def test_handlers_and_timer_are_put_back():
    """Also after an error. Would not catch a handler that was installed from C."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
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
