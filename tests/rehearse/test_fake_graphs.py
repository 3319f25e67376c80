"""What CUDA refuses while a graph is captured, each in a graph of its own, named with its line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from third_party_patches.torch.fake_cuda import build

FAULTS = Path(__file__).with_name("graph_faults.py")
SAID = {
    "reads_a_number": "a wait (aten._local_scalar_dense.default)",
    "asks_whether_one_is_true": "a wait (aten._local_scalar_dense.default)",
    "copies_to_the_host": "a copy of pageable memory",
    "copies_to_the_host_without_waiting": "a copy of pageable memory",
    "has_a_shape_of_values": "a wait (aten.nonzero.default)",
    "selects_by_a_mask": "a wait (aten.index.Tensor)",
    "copies_pageable_memory": "a copy of pageable memory",
    "brings_pageable_memory": "a copy of pageable memory",
    "brings_a_list": "a copy of pageable memory",
    "pins_memory": "an allocation of pinned memory",
    "waits_for_the_device": "a wait (device.synchronize)",
    "waits_for_a_stream": "a wait (stream.synchronize)",
    "waits_for_an_event": "a wait (event.synchronize)",
    "allocates_in_another_pool": "an allocation in another pool",
    "captures_inside": "a wait (device.synchronize)",
    "keeps_what_it_made": "memory of captured graphs is held after them",
}

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    library = build(tmp_path_factory.mktemp("pretended"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (FAULTS.parents[2], FAULTS.parent)))}
    answer = subprocess.run(
        [sys.executable, str(FAULTS), str(library)], env=environment, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", re.findall(r"^def fault_(\w+)", FAULTS.read_text(), re.MULTILINE))
def test_a_fault_in_a_graph_is_named(found, name):
    """With the line that does it. Would not catch a library whose compiled code waits."""
    said, line = found[f"fault_{name}"]
    assert SAID[name] in said and f"graph_faults.py:{line}" in said


def test_what_cuda_takes_passes(found):
    """Computing, and copies of pinned memory. Would not catch a driver that refuses more."""
    assert found["fine_computes_and_copies_pinned_memory"][0] == ""
