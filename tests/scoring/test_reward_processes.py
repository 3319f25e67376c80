"""The reward processes, with a function that does what its answer says: real processes, real kills."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from megatron_rl.cluster.stale_processes import descendants, living
from megatron_rl.errors import RewardError
from megatron_rl.scoring.function import RewardSource
from megatron_rl.scoring.outcome import Sample
from megatron_rl.scoring.reward_processes import RewardHere, RewardProcesses
from megatron_rl.user_code import worker_supervisor

pytestmark = pytest.mark.timeout(60)

OBEDIENT = """
import ctypes, math, os, signal, subprocess, sys, time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str.replace(".", "").isdigit():
        return float(solution_str)
    return eval(solution_str)
"""
BAD = {
    "1 / 0": ("raised", "ZeroDivisionError"),
    "sys.exit(3)": ("raised", "SystemExit: 3"),
    "ctypes.CDLL(None).sleep(1000)": ("timed_out", "reward_model.timeout_s=1"),
    "time.sleep(1000)": ("timed_out", "reward_model.timeout_s=1"),
    "[signal.signal(signal.SIGTERM, signal.SIG_IGN), time.sleep(1000)]": ("timed_out", "timeout_s"),
    "os._exit(3)": ("crashed", "exited with code 3"),
    "os._exit(0)": ("crashed", "exited with code 0"),
    "ctypes.string_at(0)": ("crashed", "killed by SIGSEGV"),
    "os.kill(os.getpid(), signal.SIGTERM)": ("crashed", "killed by SIGTERM"),
    "os.kill(os.getpid(), 40)": ("crashed", "killed by signal 40"),
    "math.nan": ("no_score", "returned nan"),
    "None": ("no_score", "returned None"),
    "'1.0'": ("no_score", "returned '1.0'"),
}


@pytest.fixture
def start(tmp_path):
    """Processes that call the obedient function, or the one in `text`."""

    def make(text=OBEDIENT, num_workers=2, timeout_s=1.0, give_up=True):
        path = tmp_path / "my_reward.py"
        path.write_text(text)
        return RewardProcesses(RewardSource(str(path), "compute_score"), num_workers, timeout_s, give_up)

    return make


def samples(*answers):
    return [Sample("unit", answer, "ab", {}) for answer in answers]


def gone(processes, patience_s=60.0):
    """Whether all of them end in time; ended and not yet waited for counts."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if not living(processes):
            return True
        time.sleep(0.05)
    return False


def test_scores_come_back_in_row_order(start):
    """Rows take different times on three workers. Would not catch a swap of two rows with equal scores."""
    answers = [f"time.sleep({(7 * row) % 5 / 500}) or {row}" for row in range(100)]
    with start(num_workers=3) as processes:
        for _ in range(2):
            assert [outcome.score for outcome in processes.score(samples(*answers))] == list(range(100))


def test_every_kind_of_failure_costs_one_sample(start):
    """Bad answers among good ones; a second batch after all that. Would not catch a failure in the function's file."""
    answers = [text for bad in BAD for text in ("1", bad)]
    with start() as processes:
        outcomes = processes.score(samples(*answers))
        again = processes.score(samples("2", "3"))
    assert [outcome.score for outcome in outcomes[::2]] == [1.0] * len(BAD)
    for outcome, (kind, reason) in zip(outcomes[1::2], BAD.values(), strict=True):
        assert (outcome.score, outcome.failure) == (None, kind) and reason in outcome.reason
    assert [outcome.score for outcome in again] == [2.0, 3.0]


def test_each_sample_has_its_own_time(start):
    """Eight samples of 0.2 s on one worker take longer than one may. Would not catch a limit that is a little off."""
    with start(num_workers=1) as processes:
        outcomes = processes.score(samples(*["time.sleep(0.2) or 1"] * 8))
    assert [outcome.failure for outcome in outcomes] == [""] * 8


ASYNC = """
import asyncio
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.3)
    return eval(solution_str)
"""


def test_async_functions_wait_side_by_side(start, tmp_path):
    """Forty waits of 0.3 s on two workers, and here in one process: far less than one after the other, in row order;
    an error and a score that is none beside them. Would not catch a function that returns a coroutine without `async`.
    """
    answers = [*map(str, range(38)), "1 / 0", "None"]
    with start(ASYNC, timeout_s=10.0) as processes:
        processes.score(samples("1"))
        begun = time.monotonic()
        outcomes = processes.score(samples(*answers))
        assert time.monotonic() - begun < 6
    here = RewardHere(RewardSource(str(tmp_path / "my_reward.py"), "compute_score")).score(samples(*answers))
    for found in (outcomes, here):
        assert [outcome.score for outcome in found[:38]] == list(range(38))
        assert [outcome.failure for outcome in found[38:]] == ["raised", "no_score"]


def test_loading_is_not_counted_as_a_sample(start):
    """The file takes twice a sample's time to load. Would not catch a file that never loads: that takes minutes."""
    with start("import time\ntime.sleep(1)\n" + OBEDIENT) as processes:
        assert processes.score(samples("1"))[0].score == 1.0


def test_a_batch_that_only_times_out_is_given_up(start):
    """After 16 of 100, and a few that ran beside them. Would not catch giving up where a sample was scored before."""
    answers = ["time.sleep(1000)"] * 100
    with start(timeout_s=0.05) as processes:
        outcomes = processes.score(samples(*answers))
        assert {outcome.failure for outcome in outcomes} == {"timed_out"}
        assert sum("not tried" in outcome.reason for outcome in outcomes) >= 80
        assert processes.score(samples("4"))[0].score == 4.0
    with start(timeout_s=0.02, give_up=False) as processes:
        assert not any("not tried" in outcome.reason for outcome in processes.score(samples(*answers)))


def test_a_stop_meant_for_the_whole_job_costs_no_sample(start, tmp_path):
    """The worker dies of SIGTERM once. Would not catch a worker_supervisor that dies of it."""
    once = f"os.path.exists({str(tmp_path / 'x')!r}) or (os.mkdir({str(tmp_path / 'x')!r}), os.kill(os.getpid(), 15))"
    with start() as processes:
        assert [outcome.score for outcome in processes.score(samples("1", once))] == [1.0, 1.0]


def test_keeper_ignores_the_signals_of_the_job(start):
    """SIGTERM and SIGINT end the driver, which ends the worker_supervisor. Would not catch a signal while the
    worker_supervisor starts.
    """
    with start() as processes:
        assert processes.score(samples("1"))[0].score == 1.0
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(processes._supervisor.pid, number)
        assert processes.score(samples("1"))[0].score == 1.0


def test_nothing_is_left_when_the_block_ends(start):
    """Neither workers nor what a function left running, in a session of its own. Would not catch files left behind."""
    before = descendants()
    with start() as processes:
        processes.score(samples("subprocess.Popen(['sleep', '1000'], start_new_session=True).pid"))
        processes.score(samples("os.system('setsid sleep 1000 &')"))  # its parent is gone at once
        family = descendants() - before
        assert len(family) == 5
    assert gone(family)


def test_what_a_hung_function_started_ends_with_it(start):
    """A child in its own session, under a sample that times out. Would not catch a child that lost its parent."""
    before = descendants()
    with start(num_workers=1) as processes:
        processes.score(samples("subprocess.run(['sleep', '1000'], start_new_session=True)", "1"))
        for process in descendants() - before:
            with suppress(psutil.NoSuchProcess):
                assert process.name() != "sleep" or gone([process])


def test_nothing_is_left_when_the_driver_is_killed(start, tmp_path):
    """kill -9 of a driver whose function hangs in C. Would not catch a death of driver and worker_supervisor in one
    instant.
    """
    processes = start(timeout_s=100)
    script = f"""
from megatron_rl.scoring.reward_processes import RewardHere, RewardProcesses
from megatron_rl.scoring.function import RewardSource
from megatron_rl.scoring.outcome import Sample
with RewardProcesses({processes.settings.work!r}, 2, 100, True) as processes:
    processes.score([Sample("unit", "os.mkdir('reached') or ctypes.CDLL(None).sleep(1000)", "", {{}})])
"""
    driver = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env={"PYTHONPATH": ":".join(sys.path)})
    while not (tmp_path / "reached").exists():
        time.sleep(0.02)
    family = psutil.Process(driver.pid).children(recursive=True)
    assert len(family) == 3
    driver.kill()
    driver.wait()
    assert gone(family)


def test_a_killed_keeper_is_replaced(start, capsys, tmp_path):
    """Its workers and what the function has started end, in whatever session; the jobs without an answer are done by
    another worker_supervisor, which is said. A sample that always kills it is an error. Would not catch a kill in the
    instant between two batches, which costs nothing.
    """
    killer = "os.kill(os.getppid(), 9) or time.sleep(1000)"
    once = f"os.path.exists({str(tmp_path / 'x')!r}) or (os.mkdir({str(tmp_path / 'x')!r}), {killer})"
    before = descendants()
    with start(timeout_s=100.0) as processes:
        processes.score(samples("subprocess.Popen(['setsid', 'sleep', '1000']).pid", "os.system('sleep 99&')"))
        family = descendants() - before
        assert [outcome.score for outcome in processes.score(samples("1", once, "2"))] == [1.0, 1.0, 2.0]
        assert len(family) >= 5 and gone(family)
        assert "keeps the workers of the reward function was killed by SIGKILL; another" in capsys.readouterr().out
        with pytest.raises(RewardError, match=r"killed by SIGKILL; 3 of them were lost one after the other"):
            processes.score(samples(killer))


def test_a_function_that_no_worker_can_load_is_an_error(start):
    """It loads in the driver only. Would not catch one that loads in some of the workers."""
    with (
        start("import os\nraise KeyError(os.environ['NO_SUCH_NAME'])") as processes,
        pytest.raises(RewardError, match="fails to run: KeyError: 'NO_SUCH_NAME'"),
    ):
        processes.score(samples("1"))
    with start("import os\nos._exit(9)") as processes, pytest.raises(RewardError, match="code 9 while it loaded"):
        processes.score(samples("1"))


def test_chunks_stay_small_enough_to_share():
    """Would not catch a chunk that is dealt to a worker which is not ready."""
    assert worker_supervisor.LARGEST_CHUNK <= 32


COUNTED = """
import time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with open(__file__ + ".calls", "a") as calls:
        calls.write(solution_str + "\\n")
    return float(solution_str)
"""


def test_answers_may_begin_before_their_batch(start, tmp_path):
    """The function is called once for an answer that has begun. It is called again where the answer with that number
    has another text. What began for a later batch stays for it. Would not catch a call that begins late.
    """
    calls = tmp_path / "my_reward.py.calls"
    with start(COUNTED, timeout_s=10.0) as processes:
        for answer, text in ((8, "8"), (7, "7"), (11, "11"), (9, "drawn again")):
            processes.begin(answer, samples(text)[0])
        assert [outcome.score for outcome in processes.score(samples("7", "8", "9"), numbers=range(7, 10))] == [7, 8, 9]
        assert [outcome.score for outcome in processes.score(samples("1", "2"))] == [1, 2]
        assert [outcome.score for outcome in processes.score(samples("10", "11"), numbers=(10, 11))] == [10, 11]
    assert sorted(calls.read_text().split("\n")) == sorted(["7", "8", "11", "drawn again", "9", "1", "2", "10", ""])


def test_a_batch_that_is_given_up_takes_later_answers_along(start):
    """What had begun for a later batch is called then. Would not catch a later batch that is given up for nothing."""
    with start(timeout_s=0.05, num_workers=1) as processes:
        for answer in range(40):
            processes.begin(answer, samples("time.sleep(1000)")[0])
        processes.begin(40, samples("4")[0])
        assert {o.failure for o in processes.score(samples(*["time.sleep(1000)"] * 40), range(40))} == {"timed_out"}
        assert processes.score(samples("4"), (40,))[0].score == 4.0
