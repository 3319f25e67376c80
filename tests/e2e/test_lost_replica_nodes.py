"""The node of one replica is lost: the driver hears of it, cannot restart it within the limit, and goes on without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from raylets import Raylets

REPOSITORY = Path(__file__).parents[2]
DRIVER = REPOSITORY / "tests" / "cluster" / "replica_node_driver.py"


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_replica_whose_node_is_lost_cannot_come_back_and_the_others_go_on() -> None:
    """Would not catch a node that is cut off and lives on, nor one whose loss nothing but silence tells."""
    with Raylets(3, 2) as nodes:
        paths = [str(REPOSITORY), str(DRIVER.parent)]
        env = os.environ | nodes.variables | {"PYTHONPATH": os.pathsep.join(paths)}
        pipe = subprocess.PIPE
        driver = subprocess.Popen([sys.executable, DRIVER], env=env, stdout=pipe, stderr=pipe, text=True)
        try:
            line = driver.stdout.readline()
            assert line, driver.stderr.read()
            assert len(set(json.loads(line))) == 2 and nodes.address(1) in json.loads(line)
            nodes.kill(1)
            out, err = driver.communicate(timeout=150)
        finally:
            driver.kill()
        assert driver.returncode == 0, err
        told = json.loads(out.splitlines()[-1])  # after what Ray says
        assert told["lost_node"] == nodes.address(1) and told["train_survives"]
        assert told["loss"].startswith("pool rollout_pool/") and "the process died during sleep_on" in told["loss"]
        *sooner, last = told["restarts"]
        assert all(one.startswith("the processes of pool rollout_pool/") and "\n" not in one for one in sooner)
        assert last.startswith("0 of 2 processes of pool rollout_pool/") and "is their node gone?" in last
        assert 15 <= told["seconds"] < 60
        assert told["trained"] == 5 and told["other_error"] == "None" and told["other_waits"]
        assert told["other_again"] == 6
        assert nodes.left_over() == {}
