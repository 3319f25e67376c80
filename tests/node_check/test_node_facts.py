"""What this machine says of itself: nvidia-smi's output as it is printed, and files as Linux has them."""

from __future__ import annotations

import platform

from megatron_rl.node_check.node_facts import fingerprint, node_facts, parse_gpus, parse_links, ports
from megatron_rl.node_check.node_report import GpuFacts, PortFacts

LISTED = """0, GPU-5fd4f087, NVIDIA H100 80GB HBM3, 81559, 81003, 580.65.06
1, GPU-8c1b2a44, NVIDIA H100 80GB HBM3, 81559, 12, 580.65.06
"""
TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tNODE\tSYS\t0-47\t0\t\tN/A
GPU2\tSYS\tNODE\t X \tPIX\t48-95\t1\t\tN/A
NIC0\tPIX\tSYS\tPIX\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def test_gpus_and_driver():
    """By hand; nvidia-smi counts in MiB."""
    gpus, driver = parse_gpus(LISTED)
    assert driver == "580.65.06" and len(gpus) == 2
    assert gpus[1] == GpuFacts("1", "GPU-8c1b2a44", "NVIDIA H100 80GB HBM3", 81559 << 20, 12 << 20)


def test_messages_of_nvidia_smi_are_no_gpus():
    assert parse_gpus("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n") == ((), "none")
    assert parse_gpus("0, GPU-1, NVIDIA H100, [N/A], [N/A], 580.65.06\n") == ((), "none")
    assert parse_gpus("") == ((), "none")


def test_links():
    """By hand; adapters are left out. Would not catch another form of the table."""
    assert parse_links(TOPOLOGY) == {"GPU0-GPU1": "NV18", "GPU0-GPU2": "SYS", "GPU1-GPU2": "NODE"}
    assert parse_links("") == {}


def test_ports(tmp_path):
    """Files as below /sys/class/infiniband."""
    for name, state, rate in (("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"), ("mlx5_1", "1: DOWN", "10 Gb/sec")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text(f"{rate}\n")
    (tmp_path / "mlx5_2" / "ports" / "1").mkdir(parents=True)
    assert ports(tmp_path) == (
        PortFacts("mlx5_0/1", True, 50.0),
        PortFacts("mlx5_1/1", False, 1.25),
        PortFacts("mlx5_2/1", False, 0.0),
    )
    assert ports(tmp_path / "none") == ()


def test_a_machine_with_the_programs_of_a_driver(tmp_path, monkeypatch):
    """A program named nvidia-smi that prints what one has printed. Would not catch another driver's words."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!/bin/sh\ncase $1 in topo) cat <<'END'\n{TOPOLOGY}END\n;; *) cat <<'END'\n{LISTED}END\n;; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    facts = node_facts(on_gpus=True)
    assert facts.versions["driver"] == "580.65.06" and facts.versions["python"] == platform.python_version()
    assert len(facts.gpus) == 2 and facts.links["GPU0-GPU1"] == "NV18"


def test_a_machine_without_them(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = node_facts(on_gpus=True)
    assert facts.gpus == () and facts.versions["driver"] == "none"
    assert "driver" not in node_facts(on_gpus=False).versions


def test_two_checkouts_are_told_apart(tmp_path):
    """By content and by name."""
    (tmp_path / "a.py").write_text("x = 1\n")
    before = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == before
    (tmp_path / "a.py").write_text("x = 2\n")
    changed = fingerprint(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({before, changed, fingerprint(tmp_path)}) == 3
