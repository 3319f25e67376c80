"""Which GPU a rank sees. Ray is told of GPUs that are not there and that nobody uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]


@pytest.mark.exhaustive
def test_ranks_see_their_own_gpu_or_their_worlds_whatever_the_node_says() -> None:
    """Though the node asks Ray to hide none, a rank sees one, which is its number 0; or, where it is to share memory
    with them, those of its world in rank order, and knows its own by LOCAL_RANK. Worlds on one node have no GPU in
    common. In a process of its own, because Ray remembers the tokens of a process's earlier clusters.

    Would not catch a driver library that numbers GPUs otherwise, nor a process that is started without Ray.
    """
    node = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
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
    own, world = json.loads(ran.stdout.splitlines()[-1])
    assert [index for _, index in own] == ["0", "0"] and [index for _, index in world] == ["0", "1"]
    [shared] = {gpus for gpus, _ in world}
    assert sorted([*(gpu for gpu, _ in own), *shared.split(",")]) == ["4", "5", "6", "7"]
