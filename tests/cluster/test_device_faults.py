"""A GPU that reports an error: the run loses it, and no later rank gets it. GPUs are names that nobody uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fragile_worker import FragileWorker
from launchers import BOTH, make_launcher, reserved

from megatron_rl.cluster.device_faults import fault_of
from megatron_rl.cluster.launcher import VISIBLE_GPUS
from megatron_rl.cluster.local_launcher import LocalLauncher
from megatron_rl.cluster.pool import ProcessPool
from megatron_rl.config.roles import PoolSize
from megatron_rl.errors import WorkerFailure

ECC = "uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("error_type", "message", "is_certain"),
    [
        ("AcceleratorError", f"CUDA error: {ECC}", True),
        ("AcceleratorError", "CUDA error: unspecified launch failure", False),
        ("RuntimeError", "CUDA error: an illegal memory access was encountered", False),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`", False),
        ("RuntimeError", "No CUDA GPUs are available", True),
        ("RuntimeError", "NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.", True),
        ("AcceleratorError", "CUDA error: device-side assert triggered", None),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB", None),
        ("ValueError", f"the answer is: {ECC}", None),
    ],
)
def test_errors_of_gpus(error_type: str, message: str, is_certain: bool | None) -> None:
    """As torch and the driver word them. Would not catch an error that CUDA words anew."""
    fault = fault_of(error_type, message)
    assert (fault and fault.is_certain) is is_certain


@pytest.mark.dist
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", BOTH)
def test_a_fault_is_a_loss_with_its_cause(kind: str) -> None:
    """On CPUs, where no GPU has a name. Would not catch a rank that CUDA ends before it reports."""
    with (
        make_launcher(kind) as launcher,
        reserved(launcher, 2) as ranks,
        ProcessPool("t", ranks, FragileWorker) as pool,
        pytest.raises(WorkerFailure, match=r"rank 1 \(host\) raised RuntimeError in gpu_of: CUDA error") as raised,
    ):
        pool.host(FragileWorker).gpu_of(1, ECC).get()
    fault = raised.value.device_fault
    assert raised.value.is_loss and fault is not None and fault.gpu == "" and fault.node


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_no_later_rank_gets_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of three GPUs the broken one is left out; on the other one the next rank waits for the memory of the rank before.
    Without it two ranks have room and three have none, until all are taken back. nvidia-smi is a script: would not
    catch a driver that prints otherwise.
    """
    smi, left = tmp_path / "nvidia-smi", tmp_path / "left"
    smi.write_text(
        f'#!/bin/sh\nn=$(cat {left}); echo $((n - 1)) > {left}; [ "$n" -gt 0 ] && echo 7${{n}}000 || echo 4\n'
    )
    smi.chmod(0o755)
    left.write_text("2")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv(VISIBLE_GPUS, "7,5,3")
    with LocalLauncher("cuda") as launcher:
        with reserved(launcher, 2) as ranks, ProcessPool("t", ranks, FragileWorker) as pool:
            with pytest.raises(WorkerFailure) as raised:
                pool.host(FragileWorker).gpu_of(1, ECC).get()
            assert left.read_text() == "2"  # a first start asks nothing
        fault = raised.value.device_fault
        assert fault is not None and fault.gpu == "5"
        launcher.leave_out(fault.node, fault.gpu)
        started = time.monotonic()
        with reserved(launcher, 2) as ranks, ProcessPool("t", ranks, FragileWorker) as pool:
            assert pool.host(FragileWorker).gpu_of(-1, "").get() == ["7", "3"]
        assert int(left.read_text()) < 0 and time.monotonic() - started > 1
        assert launcher.shortage([PoolSize(1, 2)]) == ""
        assert "needs 3 GPUs of this machine, which has 2 without GPU 5" in launcher.shortage([PoolSize(1, 3)])
        launcher.take_back()
        assert launcher.shortage([PoolSize(1, 3)]) == ""


@pytest.mark.exhaustive
@pytest.mark.dist
@pytest.mark.timeout(400)
def test_ray_gives_no_rank_the_gpu() -> None:
    """Of four GPUs that Ray was told of. In a process of its own, as Ray keeps a process's tokens. Would not catch GPUs
    that another run has.
    """
    others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    variables = others | {VISIBLE_GPUS: "4,5,6,7", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    driver = [sys.executable, Path(__file__).with_name("left_out_driver.py")]
    ran = subprocess.run(driver, env=variables, capture_output=True, text=True, timeout=380)
    assert ran.returncode == 0, ran.stderr
    told = next(line for line in ran.stdout.splitlines() if line.startswith("["))  # Ray adds lines of its own
    broken, later, missing, again = json.loads(told)
    assert broken in "4567" and sorted([*later, broken]) == ["4", "5", "6", "7"]
    assert "room for 0" in missing and again == ""
