"""Programs of agents and all that they start: nothing outlives its episode, its keeper or its driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from test_agent_environment import Player

from megatron_rl.agents.agent_environment import AgentSource
from megatron_rl.agents.environment_source import EnvironmentProcesses, EnvironmentsHere
from megatron_rl.agents.observation import EpisodeFailure, Observation
from megatron_rl.cluster.stale_processes import living

pytestmark = pytest.mark.timeout(120)

PROGRAM = """
import json, os, subprocess, sys, time, urllib.request
task = json.load(sys.stdin)
sleep = f"sleep {task['seconds']}"  # a child, one in a session of its own, and one that has lost its parent
subprocess.Popen(["sh", "-c", f"{sleep} & setsid {sleep} & (setsid sh -c '{sleep}; true' &)"]).wait()
if task.get("hangs"):
    time.sleep(1000)
def post(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
post("/chat/completions", {"model": "any", "messages": [{"role": "user", "content": "?"}]})
"""
DRIVER = """
import sys
from megatron_rl.agents.agent_environment import AgentSource
from megatron_rl.agents.endpoint import EndpointLimits
from megatron_rl.agents.environment_host import TurnJob
from megatron_rl.agents.environment_source import EnvironmentProcesses
with EnvironmentProcesses({agents!r}, 2, 60.0, opens=True) as processes:
    for number in range(8):
        processes.play(number, TurnJob(number, {{"seconds": {seconds}}}, (), None))
    answers = []
    while len(answers) < 8:
        answers += processes.take(waits=True)
    print("reached", flush=True)
    sys.stdin.read()
"""
DONE = Observation((), 0.0, is_done=True)


@pytest.fixture
def agents(tmp_path: Path) -> AgentSource:
    (tmp_path / "program.py").write_text(PROGRAM)
    return AgentSource(None, "run", "agent.path", (sys.executable, str(tmp_path / "program.py")), 4.0)


OWN = os.getpid() * 100
"""Seconds of sleep that tell the programs of these tests from those of another run of them on this machine."""
SOON_S = 10.0
"""A busy machine takes a moment to end what was killed."""


def all_end(seconds: int) -> bool:
    """Return whether no process of `sleepers` is left, soon."""
    deadline = time.monotonic() + SOON_S
    while [*sleepers(seconds)]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def sleepers(seconds: int) -> Iterator[psutil.Process]:
    """Yield the processes whose command is `sleep` with this number, or has it in a shell."""
    for process in living(psutil.process_iter()):
        with suppress(psutil.Error):
            if f"sleep {seconds}" in " ".join(process.cmdline()):
                yield process


@pytest.mark.parametrize(("number", "way"), [(0, "ends"), (1, "hangs"), (2, "ends here")])
def test_what_a_program_leaves_ends_with_its_episode(agents: AgentSource, number: int, way: str) -> None:
    """Children that hold its output, that have a session of their own and that have lost their parent, of a program
    that ends with code 0 and of one that is killed. Would not catch one that has dropped its environment, which ends
    with the run.
    """
    seconds = OWN + number
    with ExitStack() as opened:
        here, away = EnvironmentsHere(agents.host()), EnvironmentProcesses(agents, 1, 60.0, opens=True)
        player = Player(opened.enter_context(here if "here" in way else away), 1, seconds=seconds, hangs=way == "hangs")
        if way == "hangs":
            assert isinstance(player.opening, EpisodeFailure) and player.opening.cause == "timed_out"
        else:
            assert len([*sleepers(seconds)]) >= 3
            assert player.say("3") == DONE
        assert all_end(seconds)


def test_programs_end_with_a_killed_keeper(agents: AgentSource) -> None:
    """While one is at its task and has left others; its turns are played again. Would not catch what has dropped its
    environment.
    """
    with EnvironmentProcesses(agents, 1, 60.0, opens=True) as processes:
        player = Player(processes, 1, seconds=OWN + 10)
        before = [*sleepers(OWN + 10)]
        os.kill(processes._supervisor.pid, signal.SIGKILL)
        assert player.say("3") == DONE
        assert len(before) >= 3 and all_end(OWN + 10)


def test_nothing_is_left_ten_seconds_after_a_killed_driver(agents: AgentSource) -> None:
    """Eight programs in two processes, each with what it has left. Would not catch a death of driver and keeper in one
    instant.
    """
    script, pipe = DRIVER.format(agents=agents, seconds=OWN + 20), subprocess.PIPE
    variables = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    driver = subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, env=variables)
    assert driver.stdout is not None and driver.stdout.readline() == b"reached\n"
    family = [*psutil.Process(driver.pid).children(recursive=True), *sleepers(OWN + 20)]
    driver.kill()
    deadline = time.monotonic() + 10.0
    while living(family) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(family) > 30 and not living(family) and all_end(OWN + 20)
    driver.communicate()
