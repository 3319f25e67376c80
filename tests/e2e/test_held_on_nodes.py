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


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_columns_go_from_node_to_node() -> None:
    """64 MiB a step: exact, with less than a quarter of it in the driver, copies of each node's rows on the other, none
    left afterwards. Would not catch bytes that take another way than Ray's, nor a slow one.
    """
    with Raylets(2, 2) as nodes:
        paths = [str(REPOSITORY), str(DRIVER.parent), str(REPOSITORY / "scripts" / "bench")]
        env = os.environ | nodes.variables | {"PYTHONPATH": os.pathsep.join(paths)}
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
