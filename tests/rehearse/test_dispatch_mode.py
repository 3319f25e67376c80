"""Every case of the dispatch mode and of torch's patches under it, on a fake device, in one process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from third_party_patches.torch.fake_cuda import build

CHECKS = Path(__file__).with_name("mode_checks.py")
NAMES = re.findall(r"^def (check_\w+)", CHECKS.read_text(), re.MULTILINE)
REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("pretended"))


@pytest.fixture(scope="module")
def found(library):
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(CHECKS), str(library)]
    answer = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_operations(found, name):
    """Shapes, values, memory, waits and calls by hand. Would not catch a kernel whose memory on a GPU is another."""
    assert found[name] is None, found[name]


def test_a_device_after_torch_is_refused(library):
    """torch looks for CUDA once. Would not catch a later torch that looks again."""
    script = f"""
import torch
from pathlib import Path
from third_party_patches.torch.fake_cuda import load
load(Path({str(library)!r}))
"""
    answer = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert answer.returncode == 1 and "must be loaded before torch is imported" in answer.stderr
