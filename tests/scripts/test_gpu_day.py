"""The commands of 45 minutes on one GPU, as far as a CPU has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "scripts" / "gpu_day"
sys.path.insert(0, str(FOLDER))
from day import FAILED, PASSED, SKIPPED, code_of  # noqa: E402
from take_cumem import take  # noqa: E402

PARTS = {
    "part1_first": {"streams", "context"},
    "part2_kernels": set(),
    "part4_sft": set(),
    "part5_memory": set(),
}
"""Part -> its steps that a CPU has not."""


def run(part: str, tmp_path: Path, timeout: float = 850) -> tuple[int, str, dict]:
    """Code, output, and what was written."""
    command = [sys.executable, str(FOLDER / f"{part}.py"), "--device", "cpu", "--small", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    file = tmp_path / "out" / f"{part}.json"
    return done.returncode, done.stdout + done.stderr, json.loads(file.read_text())


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=() if part == "part2_kernels" else pytest.mark.weekly) for part in PARTS]
)
def test_a_part_passes_on_a_cpu(part: str, tmp_path: Path) -> None:
    """Every step that a CPU has, with figures; part 4 learns, saves and goes on. Would not catch what a GPU shows."""
    code, text, found = run(part, tmp_path)
    assert code == PASSED, text
    not_run = {name for name, said in found["steps"].items() if said["outcome"] == "not run"}
    assert not_run == PARTS[part]
    assert all(said["figures"] for name, said in found["steps"].items() if name not in not_run)
    assert found["device"] == "cpu" and found["small"] and "torch" in found["versions"]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_needs_a_gpu_is_skipped_and_not_passed(tmp_path: Path) -> None:
    """Part 3 says so, and its code is neither success nor failure. Would not catch what it does on a GPU."""
    code, text, found = run("part3_cumem", tmp_path, timeout=110)
    assert code == SKIPPED == 77 and "graphs, and memory that is mapped, need a GPU" in text
    assert found["steps"]["mapped_graphs"]["outcome"] == "not run"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_figures_of_memory(tmp_path: Path) -> None:
    """On a CPU the measured bytes are the planned ones."""
    code, text, found = run("part5_memory", tmp_path, timeout=110)
    assert code == PASSED, text
    update = found["steps"]["sft_memory"]["figures"]["update_actor, GB"]
    assert update["measured"] == pytest.approx(update["planned"], rel=0.01)


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        (["passed", "not run"], PASSED),
        (["not run", "not run"], SKIPPED),
        (["passed", "failed", "not run"], FAILED),
    ],
)
def test_codes(outcomes: list[str], code: int) -> None:
    assert code_of({str(number): {"outcome": outcome} for number, outcome in enumerate(outcomes)}) == code


@pytest.mark.parametrize("part", [*PARTS, "part3_cumem"])
def test_a_part_takes_ten_minutes_at_most(part: str) -> None:
    """Its steps' limits together; a part refuses to start otherwise. Would not catch the seconds between steps."""
    command = [sys.executable, str(FOLDER / f"{part}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "minutes" in done.stdout, done.stderr


LOADS = """
import vllm
from vllm.device_allocator.cumem import AllocationData, CuMemAllocator, create_and_map, cumem_available
from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary
print(vllm.__file__, cumem_available)
"""


def test_the_allocator_can_be_taken_out_of_vllm(tmp_path: Path) -> None:
    """Its Python, of what is installed, imports beside a few lines in place of the rest, without its compiled part.

    Would not catch what that part needs, which wheels for CUDA alone have.
    """
    import vllm

    compiled = take(Path(vllm.__file__).parents[1], tmp_path)
    assert compiled == []
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", LOADS], env=variables, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.split() == [str(tmp_path / "vllm" / "__init__.py"), "False"], done.stderr
