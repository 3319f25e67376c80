"""What is installed on a machine with GPUs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]


def test_the_gpu_extra_is_torch_and_vllm() -> None:
    """Pinned like the CPU's, and no transformer-engine: without a core library of its own Megatron's import dies."""
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    gpu = {one.name: str(one.specifier) for one in map(Requirement, extras["gpu"])}
    (on_cpu,) = map(Requirement, extras["cpu"])
    assert gpu == {"torch": "==2.13.0", "vllm": str(on_cpu.specifier)}


def test_megatron_imports_without_transformer_engine() -> None:
    """In a process that cannot find it. Would not catch one that is there and broken."""
    program = (
        "import sys; sys.modules['transformer_engine'] = None\n"
        "from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE, get_gpt_layer_local_spec\n"
        "assert not HAVE_TE and get_gpt_layer_local_spec(normalization='RMSNorm')"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
