"""Which GPU a rank sees. Ray is told of GPUs that are not there and that nobody uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]


def test_every_rank_sees_its_own_gpu_whatever_the_node_says() -> None:
    """Though the node asks Ray to hide none, a rank sees one, which is its number 0. In a process of its own, because
    Ray remembers the tokens of a process's earlier clusters.

    Would not catch a driver library that numbers GPUs otherwise, nor a process that is started without Ray.
    """
    node = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    driver = [sys.executable, Path(__file__).with_name("own_gpu_driver.py")]
    ran = subprocess.run(
        driver,
        env=others | node | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    seen, index = json.loads(ran.stdout.splitlines()[-1])
    assert seen in ("0", "1", "2", "3") and index == "0"
