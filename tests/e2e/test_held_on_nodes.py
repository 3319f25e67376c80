"""Ranks on two nodes read what ranks on both hold; a node that is lost is named, and nothing hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from raylets import Raylets

REPOSITORY = Path(__file__).parents[2]
DRIVER = REPOSITORY / "tests" / "cluster" / "remote_columns_driver.py"
PATHS = [str(REPOSITORY), str(DRIVER.parent), str(REPOSITORY / "scripts" / "bench")]


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.timeout(200)
def test_columns_of_a_replica_move_to_a_node_that_stays() -> None:
    """64 MiB from a replica on a node of its own, which is gone before they are read: exact, with less than a quarter
    of it in the driver, and no file is left. Would not catch a node without room: then the driver has the bytes.
    """
    with Raylets(2, 2) as nodes:
        env = os.environ | nodes.variables | {"PYTHONPATH": os.pathsep.join(PATHS)}
        command = [sys.executable, DRIVER.with_name("moved_columns_driver.py")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        report = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"apart"')))
        assert report["apart"] and report["moved"] and report["exact"] and report["growth"] < 16 << 20, report


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_columns_go_from_node_to_node() -> None:
    """64 MiB a step: exact, with less than a quarter of it in the driver, copies of each node's rows on the other, none
    left afterwards. Would not catch bytes that take another way than Ray's, nor a slow one.
    """
    with Raylets(2, 2) as nodes:
        env = os.environ | nodes.variables | {"PYTHONPATH": os.pathsep.join(PATHS)}
        pipe = subprocess.PIPE
        driver = subprocess.Popen([sys.executable, DRIVER], env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        try:
            line = driver.stdout.readline()
            assert line, driver.stderr.read()
            report = json.loads(line)
            nodes.kill(1)
            out, err = driver.communicate("go\n", timeout=150)
        finally:
            driver.kill()
        # Two that are held, two copies.
        assert report["nodes"] == 2 and report["exact"] and report["read"] and report["files"] == [4, 4]
        assert report["growth"] < 16 << 20
        lost = json.loads(next(one for one in out.splitlines() if one.startswith('{"lost"')))["lost"]
        assert len([text for text in lost if "remote column" in text and " is gone" in text]) == 1 and "" in lost, (
            lost,
            err,
        )
        assert nodes.left_over() == {}
