"""Which room may import which, and who may touch Ray, vLLM, Megatron and torch. Read from the source, lazy imports too.

The table is the architecture: an edge that is not in it is a mistake, or a decision to be made here.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = "megatron_rl"
SOURCES = sorted((REPOSITORY / PACKAGE).rglob("*.py"))

GROUND = {"errors", "balance", "dispatch", "device", "loading", "records", "slices", "config", "observe"}
PARTS = GROUND | {"parallel", "losses", "prompts", "reward"}
STAGES = {"rollout", "experience", "checkpoint"}
LOOP = {
    "train",
    "run",
    "hosting",
    "stages",
    "rollouts",
    "sliced_rollouts",
    "open_rollouts",
    "rewards",
    "algorithm",
    "pretraining",
    "validation",
    "lifecycle",
    "run_folder",
    "book",
    "report",
}
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "balance": set(),
    "dispatch": set(),
    "clock": set(),
    "device": set(),
    "loading": set(),
    "templates": set(),
    "records": set(),
    "slices": {"records"},
    "stream": {"errors", "records", "slices", "observe"},
    "config": {"errors"},
    "observe": {"errors"},
    **dict.fromkeys(("parallel", "losses"), GROUND),
    **dict.fromkeys(("prompts", "reward"), GROUND | {"templates"}),
    "supervised": GROUND | {"prompts", "templates"},
    **dict.fromkeys(("model", "hybrid_engine"), GROUND | {"parallel"}),
    **dict.fromkeys(STAGES, PARTS | {"model", "hybrid_engine"}),
    "roles": PARTS | STAGES | {"model", "hybrid_engine"},
    "cluster": GROUND,
    "generation": PARTS | STAGES | {"hybrid_engine", "roles", "cluster", "stream"},
    "planner": GROUND | {"parallel", "hybrid_engine", "model", "checkpoint", "prompts", "stream", "clock"},
    "mapping": {"errors", "config", "observe", "planner", "clock", "parallel", "model", "checkpoint"},
    **dict.fromkeys(
        LOOP,
        PARTS | STAGES | LOOP | {"hybrid_engine", "roles", "cluster", "planner", "stream", "generation", "supervised"},
    ),
    "port": {"errors", "config", "planner"},
    "trials": {"errors", "config", "observe", "checkpoint", "planner", "cluster"},
    "profiling": GROUND | {"planner", "roles", "cluster", "trials"},
    "cli": GROUND | LOOP | {"planner", "cluster", "roles", "checkpoint", "trials", "port", "mapping", "profiling"},
    "__main__": {"cli", "cluster"},
}
"""Room -> rooms it may import."""

PURE_PARTS = (
    f"{PACKAGE}.parallel.context_packs",
    f"{PACKAGE}.parallel.rank_grid",
    f"{PACKAGE}.parallel.sharding",
    f"{PACKAGE}.parallel.stages",
    f"{PACKAGE}.hybrid_engine.layout",
    f"{PACKAGE}.hybrid_engine.plan",
    f"{PACKAGE}.hybrid_engine.schedule",
    f"{PACKAGE}.checkpoint.durable",
    f"{PACKAGE}.checkpoint.folders",
    f"{PACKAGE}.checkpoint.identity",
    f"{PACKAGE}.checkpoint.manifest",
    f"{PACKAGE}.checkpoint.pickles",
    f"{PACKAGE}.checkpoint.resume",
    f"{PACKAGE}.checkpoint.score_statistics",
    f"{PACKAGE}.checkpoint.storage",
    f"{PACKAGE}.checkpoint.targets",
    f"{PACKAGE}.checkpoint.weight_files",
    f"{PACKAGE}.model.chunks",
    f"{PACKAGE}.model.families",
    f"{PACKAGE}.prompts.files",
    f"{PACKAGE}.stream.engine_model",
    f"{PACKAGE}.stream.estimates",
    f"{PACKAGE}.stream.rules",
    f"{PACKAGE}.stream.scheduler",
    f"{PACKAGE}.stream.simulate",
)
"""All that planner and mapping may import of those rooms."""
PURE_ROOMS = GROUND | {"clock", "planner"}
"""Rooms of which they may import everything, as far as the table lets them."""

LIBRARIES: dict[str, set[str]] = {
    "ray": {"cluster"},
    "vllm": {"rollout", "parallel/vllm_ps.py", "hybrid_engine/cuda_memory.py"},
    "megatron": {"parallel", "model", "checkpoint", "roles"},
    "third_party_patches": {"cluster", "roles", "rollout"},
}
"""Library -> rooms (or single files) that may import it."""

WITHOUT_TORCH = (
    *("errors", "balance", "dispatch", "loading", "config", "clock", "planner", "mapping"),
    *("port", "trials", "cli", "__main__"),
)
PURE = (
    *("errors", "balance", "dispatch", "config", "records", "slices", "stream", "observe"),
    *("losses", "prompts", "supervised", "reward", "templates", "clock", "planner", "mapping", "experience"),
)


def room_of(path: Path) -> str:
    parts = path.relative_to(REPOSITORY / PACKAGE).with_suffix("").parts
    return parts[0]


def imported_modules(source: str) -> Iterator[str]:
    """Dotted names a source imports, wherever the statement stands; `from a import b` gives both a and a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the room they come from"
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def forbidden_imports(path: Path, source: str) -> list[str]:
    room, name = room_of(path), path.relative_to(REPOSITORY / PACKAGE).as_posix()
    found = []
    for module in imported_modules(source):
        top, *below = module.split(".")
        if top == PACKAGE and below and below[0] != room and below[0] in ROOMS:
            is_pure = below[0] in PURE_ROOMS or module.startswith(PURE_PARTS)
            impure = room in ("planner", "mapping") and not is_pure
            if below[0] not in ROOMS[room] or impure:
                found.append(f"{name}: {room} may not import {module}")
        elif top in LIBRARIES and not {room, name} & LIBRARIES[top]:
            found.append(f"{name}: only {', '.join(sorted(LIBRARIES[top]))} may import {module}")
        elif top == "torch" and room in WITHOUT_TORCH:
            found.append(f"{name}: {room} must work without torch, and imports {module}")
    return found


def test_every_import_is_allowed():
    """Would not catch an import made by name, with importlib."""
    unknown = {room_of(path) for path in SOURCES} - set(ROOMS) - {"__init__"}
    assert not unknown, f"new rooms need a row in the table: {unknown}"
    found = [line for path in SOURCES if room_of(path) in ROOMS for line in forbidden_imports(path, path.read_text())]
    assert not found, "\n".join(sorted(set(found)))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("losses/x.py", "import ray"),
        ("losses/x.py", "def f():\n    from ray.util import placement_group"),
        ("parallel/mpu.py", "import vllm"),
        ("config/x.py", "from torch import nn"),
        ("observe/x.py", "from megatron_rl import cluster"),
        ("hybrid_engine/x.py", "import megatron_rl.model.gpt"),
        ("rollout/x.py", "from megatron_rl.experience.micro_batches import MicroBatch"),
        ("planner/x.py", "from megatron_rl.parallel.mpu import TrainGroups"),
        ("planner/x.py", "from megatron_rl.model.gpt import transformer_config"),
        ("mapping/x.py", "from megatron_rl.model.gpt import transformer_config"),
        ("planner/x.py", "from megatron_rl.mapping.search import Search"),
        ("clock/x.py", "from megatron_rl.planner.time import Estimator"),
        ("roles/x.py", "from megatron_rl.cli import app"),
    ],
)
def test_checker_sees_forbidden_imports(file, source):
    """The rule book bites. Would not catch a rule that is missing from the table."""
    assert forbidden_imports(REPOSITORY / PACKAGE / file, source)


def test_checker_allows_the_pure_parts_to_the_planner():
    """Would not catch a pure part that grows an impure import of its own; importing the planner without torch does."""
    file = REPOSITORY / PACKAGE / "planner" / "x.py"
    assert not forbidden_imports(file, "from megatron_rl.parallel.rank_grid import TrainGrid")


def test_no_cycles_between_rooms():
    """Would not catch a cycle between the files of one room."""
    graph: dict[str, set[str]] = {}
    for path in SOURCES:
        modules = imported_modules(path.read_text())
        rooms = {module.split(".")[1] for module in modules if module.startswith(f"{PACKAGE}.")}
        graph.setdefault(room_of(path), set()).update((rooms & set(ROOMS)) - {room_of(path)})
    TopologicalSorter(graph).prepare()


def import_rooms(rooms: tuple[str, ...], absent: tuple[str, ...]) -> subprocess.CompletedProcess:
    """Import every module of `rooms` in a fresh process in which the libraries `absent` cannot be found."""
    modules = [
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        for path in SOURCES
        if room_of(path) in rooms and path.stem != "__main__"
    ]
    script = f"""
import importlib, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
for library in {absent!r}:
    sys.modules[library] = None  # importlib.util.find_spec() then says that it is not installed
sys.meta_path.insert(0, Absent())
for module in {modules!r}:
    importlib.import_module(module)
print(len({modules!r}), "imported")
"""
    return subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("rooms", "absent"),
    [
        (PURE, ("ray", "vllm", "megatron")),
        (WITHOUT_TORCH, ("ray", "vllm", "megatron", "torch", "transformers")),
    ],
    ids=["without engines", "without torch"],
)
def test_pure_rooms_import_where_libraries_are_absent(rooms, absent):
    """Would not catch an import inside a function that these modules only call later."""
    finished = import_rooms(rooms, absent)
    assert finished.returncode == 0, finished.stderr
    assert int(finished.stdout.split()[0]) >= len(rooms) - 1


def test_absent_libraries_really_are_absent():
    """The harness of the test above refuses a room that needs Ray. Would not catch one that only looks for it."""
    finished = import_rooms(("cluster",), ("ray",))
    assert finished.returncode != 0 and "ray" in finished.stderr
