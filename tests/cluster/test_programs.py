"""Programs that hang, that print without an end, and that leave children: they cost their limit and nothing more."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_rl.cluster.programs import answer_of, supervised
from megatron_rl.cluster.stale_processes import descendants

pytestmark = pytest.mark.timeout(60)


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
        ("env -i setsid sh -c 'sleep 6004 & sleep 6005' & echo bare", "bare\n", ""),
    ],
)
def test_an_answer_is_bounded_and_leaves_nothing(script: str, text: str, fault: str) -> None:
    """Would not catch a process that was told to run by a service outside of the family."""
    started = time.monotonic()
    answer = answer_of(["sh", "-c", script], 1.0 if "6001" in script else 60.0, 1000)
    assert (answer.text, answer.fault) == (text, fault) and time.monotonic() - started < 50
    assert not any(running(f"sleep {number}") for number in range(6001, 6006))


def test_a_program_that_cannot_be_started(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    answer = answer_of([str(tmp_path / "text")], 1.0)
    assert answer.fault == f"{tmp_path / 'text'} cannot be started: Permission denied"


CROWDED = """
import os, resource, signal, sys
from pathlib import Path
from megatron_rl.cluster import programs
most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
def permit(number): resource.setrlimit(resource.RLIMIT_NPROC, (number, most))
if os.getuid() == 0:
    os.setuid(65534)
permit(1)
programs.START_S = float(sys.argv[1])
signal.signal(signal.SIGALRM, lambda *_: permit(most))
signal.setitimer(signal.ITIMER_REAL, 1.0)
print(programs.answer_of(["/bin/echo", "begun"], 30.0, temporary=Path("/tmp")))
"""


@pytest.mark.parametrize(
    ("patience", "answer"), [("60", "text='begun\\n', fault=''"), ("0", "cannot be started: Resource temporarily")]
)
def test_a_machine_with_too_many_processes_gets_time(patience: str, answer: str) -> None:
    """As a user with a limit of processes. Would not catch a limit that a container has, which gives the same error."""
    done = subprocess.run([sys.executable, "-c", CROWDED, patience], capture_output=True, text=True, timeout=50)
    assert answer in done.stdout, done.stderr


FAMILY = """
import os, subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {deaf!r}], start_new_session=True)"
for start_new_session in (False, True):
    subprocess.run([sys.executable, "-c", child], start_new_session=start_new_session)
print("two orphans", flush=True)
"""
HOLD = """
import sys, time, pathlib
from megatron_rl.cluster.programs import supervised
with supervised([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"],
            pathlib.Path(sys.argv[1])):
    time.sleep(600)
"""


def wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("end", ["", "time.sleep(600)"], ids=["ended by itself", "ended by us"])
def test_orphans_of_other_sessions_end_too(tmp_path: Path, end: str) -> None:
    """Two that ignore SIGTERM, in sessions of their own, whose parents have gone.

    Would not catch a process that was told to run by a service outside of the family.
    """
    before, output = descendants(), tmp_path / "output.txt"
    with supervised([sys.executable, "-c", FAMILY + end], output, grace_s=5.0) as process:
        wait_for(lambda: "two orphans" in output.read_text())
        wait_for(lambda: len(descendants() - before) >= 2)
        wait_for(lambda: end or process.poll() is not None)
    assert descendants() == before
    assert process.returncode == (-signal.SIGTERM if end else 0)


def test_a_process_gets_time_to_end_well(tmp_path: Path) -> None:
    """It says what it does on SIGTERM; one that does nothing is killed when the time is over."""
    polite = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nprint(1, flush=True)\n"
    deaf = polite.replace("lambda *_: sys.exit(7)", "signal.SIG_IGN")
    for source, code in ((polite, 7), (deaf, -signal.SIGKILL)):
        output = tmp_path / f"{code}.txt"
        with supervised([sys.executable, "-c", source + "time.sleep(600)"], output, grace_s=1.0) as process:
            wait_for(lambda output=output: output.read_text())
        assert process.returncode == code


def test_a_process_ends_with_a_killed_parent(tmp_path: Path) -> None:
    """SIGKILL to the one that holds it, which cannot clean up. Would not catch what it had started itself."""
    output = tmp_path / "output.txt"
    output.touch()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(output)])
    try:
        wait_for(lambda: output.read_text().strip())
        held = psutil.Process(int(output.read_text()))
    finally:
        holder.kill()
        holder.wait()
    held.wait(10)
