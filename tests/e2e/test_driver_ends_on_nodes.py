"""The driver of ranks on four nodes ends while they are in a call: nothing of the run is left on any of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from raylets import Raylets

from megatron_rl.cluster.stale_processes import processes_with

REPOSITORY = Path(__file__).parents[2]
DRIVER = REPOSITORY / "tests" / "cluster" / "driver_on_nodes.py"
NUM_NODES, PER_NODE, PATIENCE_S = 4, 2, 60.0


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_nothing_is_left_on_any_node() -> None:
    """By Ctrl-C and by a kill, one run after the other on the same nodes, whose places are free again. Would not catch
    what only machines of their own leave.
    """
    with Raylets(*[PER_NODE] * NUM_NODES) as nodes:
        for signum, exit_code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
            ends_by(signum, exit_code, nodes)


def ends_by(signum: int, exit_code: int, nodes: Raylets) -> None:
    env = os.environ | nodes.variables | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(DRIVER.parent)])}
    command, pipe = [sys.executable, DRIVER, str(NUM_NODES), str(PER_NODE)], subprocess.PIPE
    driver = subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        line = driver.stdout.readline()
        assert line, driver.stderr.read()
        told = json.loads(line)
        assert len(told["hosts"]) == NUM_NODES
        assert all(len(nodes.ranks(node)) == PER_NODE for node in range(NUM_NODES))
        driver.send_signal(signum)
        assert driver.wait(PATIENCE_S) == exit_code
    finally:
        driver.kill()
    assert nodes.left_over(PATIENCE_S) == {}
    folder = Path(tempfile.gettempdir(), f"megatron_rl-{os.getuid()}", told["run"])
    deadline = time.monotonic() + PATIENCE_S
    while (left := processes_with(told["run"])) or folder.exists():
        assert time.monotonic() < deadline, (left, folder)
        time.sleep(0.2)
