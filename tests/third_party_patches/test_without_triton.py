"""Megatron-core's kernels are imported without Triton, and nothing else sees Triton then or later."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = "import triton\nimport triton.language as tl\n@triton.jit\ndef copy(x, N: tl.constexpr): ...\n"
CHECK = """
import importlib, importlib.util, sys
import megatron_rl
from third_party_patches.megatron_core import without_triton

def missing(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return error.name

without_triton.KERNELS = "kernels_of_a_library"
[finder] = [each for each in sys.meta_path if isinstance(each, without_triton.KernelsFinder)]
sys.meta_path.remove(finder)
assert missing("kernels_of_a_library") == "triton"
without_triton.apply()
without_triton.apply()
assert callable(importlib.import_module("kernels_of_a_library").copy)
assert importlib.util.find_spec("triton") is None and "triton" not in sys.modules
assert missing("other_kernels") == "triton"
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
def test_without_triton(tmp_path: Path) -> None:
    """Without: a missing module. Would not catch a later megatron-core that imports Triton in another module."""
    for name in ("kernels_of_a_library", "other_kernels"):
        (tmp_path / f"{name}.py").write_text(KERNELS)
    folders = f"{tmp_path}:{Path(__file__).parents[2]}"
    done = subprocess.run([sys.executable, "-c", CHECK], env={"PYTHONPATH": folders}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
