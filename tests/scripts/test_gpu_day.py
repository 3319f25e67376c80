"""The commands of half an hour on one GPU, as far as a CPU has them, and the packages of a machine that is lent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "scripts" / "gpu_day"
sys.path.insert(0, str(FOLDER))
sys.path.insert(0, str(FOLDER / "steps"))
import grpo  # noqa: E402
from day import FAILED, PASSED, SKIPPED, code_of  # noqa: E402
from fetch_wheels import VLLM, check  # noqa: E402
from listed import CARRIED, MACHINE, as_on_the_machine, listed  # noqa: E402
from short_run import PROGRAM, ShortRun, run_program  # noqa: E402
from take_cumem import take  # noqa: E402

PARTS = {
    "part1_kernels": set(),
    "part2_cumem": {"mapped_graphs", "streams"},
    "part3_train": set(),
    "part4_first": {"context"},
    "part5_variants": set(),
}
"""Part -> its steps that a CPU has not."""
NOT_REHEARSED = {
    "part1_kernels": set(),
    "part2_cumem": {"mapped_graphs", "rounds"},
    "part3_train": set(),
    "part4_first": {"context", "topology", "held_memory"},
    "part5_variants": set(),
}
"""Part -> its steps that ask a driver, or for vLLM."""


ON_CPU = ("--device", "cpu", "--small")


def run(part: str, tmp_path: Path, timeout: float = 850, options: tuple[str, ...] = ON_CPU) -> tuple[int, str, dict]:
    """Code, output, and what was written."""
    command = [sys.executable, str(FOLDER / f"{part}.py"), *options, "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    file = tmp_path / "out" / f"{part}.json"
    return done.returncode, done.stdout + done.stderr, json.loads(file.read_text())


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=() if part == "part1_kernels" else pytest.mark.weekly) for part in PARTS]
)
def test_a_part_passes_on_a_cpu(part: str, tmp_path: Path) -> None:
    """Every step that a CPU has, with figures; part 3 learns, saves and goes on. Would not catch what a GPU shows."""
    code, text, found = run(part, tmp_path)
    assert code == PASSED, text
    not_run = {name for name, said in found["steps"].items() if said["outcome"] == "not run"}
    assert not_run == PARTS[part]
    assert all(said["figures"] for name, said in found["steps"].items() if name not in not_run)
    assert found["device"] == "cpu" and found["small"] and "torch" in found["versions"]


@pytest.mark.exhaustive
@pytest.mark.weekly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_rehearsed(part: str, tmp_path: Path) -> None:
    """With a GPU's sizes and the packages of the machine and of carried.txt alone, but for what asks a driver.

    Would not catch values, kernels, and another torch.
    """
    code, text, found = run(part, tmp_path, 1750, ("--rehearse",))
    assert code == PASSED, text
    assert {name for name, said in found["steps"].items() if said["outcome"] == "not run"} == NOT_REHEARSED[part]


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_sizes_of_a_gpu_break_no_rule(stage: str, tmp_path: Path) -> None:
    """Preflights of the runs that a GPU gets, their rows fit into the model: one layer of 24."""
    sizes = replace(ShortRun.of("cuda", False), layers=1)
    config = sizes.write(tmp_path) if stage == "sft" else grpo.write(tmp_path, "cuda", False, layers=1)
    run_program([*PROGRAM, "plan", "--stage", stage, "--config", str(config)])


def imports(tmp_path: Path, module: str, *lists: Path) -> subprocess.CompletedProcess:
    """Import a module where only the packages of these lists are."""
    variables = {**os.environ, **as_on_the_machine(tmp_path, *lists)}
    command = [sys.executable, "-W", "ignore", "-c", f"import {module}"]
    return subprocess.run(
        command, cwd=FOLDER.parents[1], env=variables, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_carried_packages_are_enough_and_needed(tmp_path: Path) -> None:
    """The configuration imports with them; without them the first that is missing is named.

    Would not catch what the machine has in another version.
    """
    whole = imports(tmp_path, "megatron_rl.config.schema, megatron_rl.roles.host, typer.testing")
    assert whole.returncode == 0, whole.stderr
    bare = imports(tmp_path, "megatron_rl.config.schema", MACHINE)
    assert bare.returncode == 1 and "ModuleNotFoundError: No module named" in bare.stderr
    assert "No module named 'vllm'" in imports(tmp_path, "vllm").stderr


def test_carried_versions_are_pinned_ones() -> None:
    """Of requirements/gpu.txt, where it names the package, and else those that are installed here."""
    pinned = (FOLDER.parents[1] / "requirements" / "gpu.txt").read_text()
    for name, installed in listed(CARRIED).items():
        assert installed and (f"{name}=={installed}" in pinned or version(name) == installed), name
    assert VLLM in pinned and not listed(CARRIED).keys() & (listed(MACHINE).keys() - {"typer"})


def test_what_is_carried_is_checked(tmp_path: Path) -> None:
    """One wheel of each package, 50 MB together. Would not catch a wheel that does not install."""
    wanted = {"megatron-core": "1.0", "typer": "2.0"}
    for name in ("megatron_core-1.0-cp312-x.whl", "typer-2.0-py3-none-any.whl"):
        (tmp_path / name).write_bytes(b"wheel")
    assert check(tmp_path, wanted) == 10
    with (tmp_path / "cumem").open("wb") as large:
        large.truncate(50_000_000)
    with pytest.raises(ValueError, match="at most 50 may be carried"):
        check(tmp_path, wanted)
    (tmp_path / "typer-1.0-py3-none-any.whl").write_bytes(b"wheel")
    with pytest.raises(ValueError, match="typer==1.0.*fetch again"):
        check(tmp_path, wanted)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_needs_a_gpu_is_skipped_and_not_passed(tmp_path: Path) -> None:
    """Part 2 says so of graphs. Would not catch what it does on a GPU."""
    code, text, found = run("part2_cumem", tmp_path, timeout=110)
    assert code == PASSED and "graphs, and memory that is mapped, need a GPU" in text
    assert found["steps"]["mapped_graphs"]["outcome"] == "not run"


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


@pytest.mark.parametrize("part", PARTS)
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
