"""Which room may import which, and who may touch Ray, vLLM, Megatron and torch. Read from the source, lazy imports too.

The table is the architecture: an edge that is not in it is a mistake, or a decision to be made here.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = "megatron_rl"
SOURCES = sorted((REPOSITORY / PACKAGE).rglob("*.py"))

SCHEDULE = {
    f"sampling.{name}"
    for name in (
        "request_scheduler",
        "verdicts",
        "load_balancing",
        "engine_model",
        "journal",
        "filtered_replay",
        "filtered_requests",
        "scheduled_replica",
        "group_map",
        "image_tensors",
        "in_flight",
        "replay",
        "requests",
        "schedule_types",
    )
} | {"sampling.scheduler", "sampling.simulate"}
"""What decides who draws what under which weights: counts and plain data, which the planner simulates."""

TURNS = {"agents.observation", "agents.as_json", "agents.episode", "agents.image_parts"}
"""Turns of episodes as plain data."""

GROUND = {
    *(
        "errors",
        "plain_values",
        "dispatch",
        "device",
        "columns",
        "images",
        "remote_columns",
        "records",
        "config",
        "observe",
    ),
    *("parallel.balance", "rollout.slices", "cluster.channel", "cluster.child_processes", "cluster.stale_processes"),
    "cluster.programs",
}
PARTS = GROUND | {"parallel", "losses", "data", "user_code", "scoring"}
HELD = {"rollout", "experience", "checkpoint"}
SAMPLED = (
    PARTS
    | HELD
    | {"hybrid_engine", "roles", "cluster", "scoring.rewards", "scoring.sampled_batch"}
    | SCHEDULE
    | {"scoring.batch_scorers", "scoring.teachers", "agents", *TURNS}
)
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "dispatch": set(),
    "device": set(),
    "columns": set(),
    "images": set(),
    "remote_columns": set(),
    "records": {"columns", "images", "remote_columns"},
    "parallel.balance": set(),
    "cluster.channel": set(),
    "cluster.child_processes": {"cluster.channel"},
    "cluster.stale_processes": {"cluster.child_processes"},
    "cluster.programs": {"cluster.child_processes", "cluster.stale_processes"},
    "rollout.slices": {"images", "remote_columns", "records"},
    "plain_values": set(),
    "config": {"errors", "columns", "plain_values"},
    "observe": {"errors", "plain_values"},
    "view": {"errors", "config", "observe", "plain_values"},
    **dict.fromkeys(("parallel", "losses"), GROUND),
    "data": GROUND,
    "user_code": GROUND,
    "scoring": GROUND | {"data", "user_code"},
    **dict.fromkeys(TURNS, GROUND | {"user_code"} | TURNS),
    "agents": GROUND | {"data", "user_code"} | TURNS,
    **dict.fromkeys(("model", "hybrid_engine"), GROUND | {"parallel"}),
    **dict.fromkeys(HELD, PARTS | {"model", "hybrid_engine"}),
    "roles": PARTS | HELD | {"model", "hybrid_engine"},
    "cluster": GROUND,
    **dict.fromkeys(
        SCHEDULE, {"errors", "images", "remote_columns", "records", "rollout.slices", "observe"} | TURNS | SCHEDULE
    ),
    "scoring.rewards": PARTS | HELD,
    "scoring.sampled_batch": PARTS | HELD,
    "scoring.batch_scorers": PARTS | HELD | {"scoring.rewards", "scoring.sampled_batch"},
    "scoring.teachers": PARTS | {"scoring.sampled_batch"},
    "sampling": SAMPLED,
    "planning": GROUND | {"parallel", "hybrid_engine", "model", "checkpoint", "data"} | SCHEDULE,
    "planning.layout_search": {
        "errors",
        "config",
        "observe",
        "parallel",
        "model",
        "checkpoint",
        "planning",
    },
    "node_check": GROUND | {"roles", "cluster"},
    "controller": SAMPLED | {"planning", "sampling", "node_check"},
    "tasks": SAMPLED | {"planning", "controller", "sampling"},
    "train": SAMPLED | {"sampling", "controller"},
    "serve": SAMPLED | {"planning", "controller"},
    "port": {"errors", "config", "planning", "user_code", "cluster.programs", "cluster.stale_processes"},
    "starter": {"errors", "config", "observe", "data", "checkpoint", "planning"},
    "trials": {"errors", "config", "observe", "checkpoint", "planning", "cluster"} | {"cluster.programs"},
    "profile": GROUND | {"checkpoint", "planning", "model", "roles", "cluster", "trials"},
    "rehearse": GROUND | {"checkpoint", "planning", "parallel", "model", "hybrid_engine", "roles", "cluster"},
    "cli": GROUND
    | {"rehearse"}
    | {"train", "tasks", "controller", "roles", "cluster", "checkpoint", "data", "trials", "port", "profile", "view"}
    | {"starter", "node_check", "agents", "serve", *TURNS}
    | {"planning", "planning.layout_search"},
    "__main__": {"cli", "cluster"},
}
"""Room, or part of one -> rooms and parts it may import. The longest name that fits a module is its row; a room may
import its parts only where its row says so."""

TOP = {path.stem for path in (REPOSITORY / PACKAGE).iterdir() if not path.stem.startswith("__")}
MOST_FLOORS = 12

PURE_PARTS = (
    f"{PACKAGE}.parallel.context_packs",
    f"{PACKAGE}.parallel.muon_runs",
    f"{PACKAGE}.parallel.rank_grid",
    f"{PACKAGE}.parallel.scale_blocks",
    f"{PACKAGE}.parallel.sharding",
    f"{PACKAGE}.parallel.stages",
    f"{PACKAGE}.hybrid_engine.transfer_plan",
    f"{PACKAGE}.hybrid_engine.delta_sizes",
    f"{PACKAGE}.hybrid_engine.eight_bit_members",
    f"{PACKAGE}.hybrid_engine.layout",
    f"{PACKAGE}.hybrid_engine.plan",
    f"{PACKAGE}.hybrid_engine.schedule",
    f"{PACKAGE}.checkpoint.adapter_folder",
    f"{PACKAGE}.checkpoint.durable",
    f"{PACKAGE}.checkpoint.folders",
    f"{PACKAGE}.checkpoint.identity",
    f"{PACKAGE}.checkpoint.manifest",
    f"{PACKAGE}.checkpoint.pickles",
    f"{PACKAGE}.checkpoint.resume",
    f"{PACKAGE}.checkpoint.score_statistics",
    f"{PACKAGE}.checkpoint.storage",
    f"{PACKAGE}.checkpoint.model_folder",
    f"{PACKAGE}.checkpoint.output_paths",
    f"{PACKAGE}.checkpoint.weight_files",
    f"{PACKAGE}.model.chunks",
    f"{PACKAGE}.model.families",
    f"{PACKAGE}.model.parts",
    f"{PACKAGE}.data.row_files",
    f"{PACKAGE}.sampling.engine_model",
    f"{PACKAGE}.sampling.schedule_types",
    f"{PACKAGE}.sampling.scheduler",
    f"{PACKAGE}.sampling.simulate",
)
"""All that planner and layout search may import of those rooms."""
PURE_ROOMS = GROUND | {"planning"}
"""Rooms of which they may import everything, as far as the table lets them."""

LIBRARIES: dict[str, set[str]] = {
    "ray": {"cluster"},
    "vllm": {"rollout", "parallel/vllm_ps.py", "hybrid_engine/cuda_memory.py", "agents/tool_parser.py"},
    "megatron": {"parallel", "model", "checkpoint", "roles", "rehearse"},
    "third_party_patches": {"cluster", "roles", "rollout", "rehearse"},
}
"""Library -> rooms (or single files) that may import it."""

WITHOUT_TORCH = (
    "errors",
    "plain_values",
    "columns",
    "images",
    "dispatch",
    "parallel.balance",
    "config",
    "planning",
    "port",
    "trials",
    "view",
    "cli",
    "__main__",
)
PURE = (
    *(
        "errors",
        "columns",
        "dispatch",
        "config",
        "records",
        "parallel.balance",
        "rollout.slices",
        "observe",
        "losses",
        "data",
    ),
    *("scoring", "planning", "experience", *sorted(SCHEDULE)),
)
"""Rooms and parts without Ray, vLLM and Megatron. Parts of `scoring` with rows of their own are not."""


def row_of(module: str) -> str:
    """Row of a module, named without the package: "sampling.scheduler.Scheduler" -> "sampling.scheduler"; a new room's
    own name.
    """
    names = module.split(".")
    prefixes = [".".join(names[:length]) for length in range(len(names), 0, -1)]
    return next((prefix for prefix in prefixes if prefix in ROOMS), names[0])


def room_of(path: Path) -> str:
    """Row of a source file."""
    return row_of(".".join(path.relative_to(REPOSITORY / PACKAGE).with_suffix("").parts))


def is_in(room: str, rooms: tuple[str, ...]) -> bool:
    """Whether a row is one of the rooms or a part of one."""
    return room in rooms or room.split(".")[0] in rooms


@cache
def imported_by(path: Path) -> tuple[str, ...]:
    """What a file imports; several tests ask."""
    return tuple(imported_modules(path.read_text()))


def imported_modules(source: str) -> Iterator[str]:
    """Dotted names a source imports, wherever the statement stands; `from a import b` gives both a and a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the room they come from"
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def forbidden_imports(path: Path, imported: Iterable[str]) -> list[str]:
    room, name = room_of(path), path.relative_to(REPOSITORY / PACKAGE).as_posix()
    found = []
    for module in imported:
        top, _, below = module.partition(".")
        row = row_of(below)
        if top == PACKAGE and row != room and row in ROOMS:
            is_pure = row in PURE_ROOMS or module.startswith(PURE_PARTS)
            impure = room in ("planning", "planning.layout_search") and not is_pure
            if row not in ROOMS[room] or impure:
                found.append(f"{name}: {room} may not import {module}")
        elif top in LIBRARIES and not {room.split(".")[0], name} & LIBRARIES[top]:
            found.append(f"{name}: only {', '.join(sorted(LIBRARIES[top]))} may import {module}")
        elif top == "torch" and is_in(room, WITHOUT_TORCH):
            found.append(f"{name}: {room} must work without torch, and imports {module}")
    return found


def test_every_import_is_allowed():
    """Would not catch an import made by name, with importlib."""
    unknown = {room_of(path) for path in SOURCES if path.stem != "__init__"} - set(ROOMS)
    assert not unknown, f"new rooms need a row in the table: {unknown}"
    found = [line for path in SOURCES if room_of(path) in ROOMS for line in forbidden_imports(path, imported_by(path))]
    assert not found, "\n".join(sorted(set(found)))


SEAM = "model/decoder.py"
OF_A_CHUNK = {"decoder", "pre_process", "post_process", "output_layer", "rotary_pos_emb", "position_embedding_type"}
OF_A_CHUNK |= {"share_embeddings_and_output_weights", "shared_embedding_or_output_weight", "word_embeddings"}


def chunk_parts(source: str) -> set[str]:
    """Megatron's model classes and their attributes that a source names."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)} & OF_A_CHUNK
    return names | {one for one in ("GPTModel", "HybridModel") if one in source}


def test_one_file_depends_on_megatrons_model_class():
    """Others ask it for layers, embedding, norm and head. Would not catch names of parameters, also Megatron's."""
    rooms = ("model", "roles", "hybrid_engine", "checkpoint", "experience", "losses", "rollout")
    found = {
        path.relative_to(REPOSITORY / PACKAGE).as_posix(): chunk_parts(path.read_text())
        for path in SOURCES
        if is_in(room_of(path), rooms)
    }
    assert found.pop(SEAM) >= {"GPTModel", "decoder", "pre_process"}
    assert not {name: parts for name, parts in found.items() if parts}


BY_NAME = {"agents/class_tools.py", "config/declarations.py", "cluster/supervisor.py"}
BY_NAME |= {"observe/services.py", "observe/step_spans.py", "model/tower.py"}
"""Files that import modules by name: the plug-ins of a configuration, optional services, what a rank preloads, and
transformers' vision towers.
"""


def test_imports_by_name_are_known():
    """The rules above cannot see them. Would not catch `__import__`, nor a name that is passed on."""
    calls = {
        path.relative_to(REPOSITORY / PACKAGE).as_posix() for path in SOURCES if "import_module(" in path.read_text()
    }
    assert calls == BY_NAME


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
        ("planning/x.py", "from megatron_rl.parallel.mpu import TrainGroups"),
        ("planning/x.py", "from megatron_rl.model.gpt import transformer_config"),
        ("planning/layout_search/x.py", "from megatron_rl.model.gpt import transformer_config"),
        ("planning/x.py", "from megatron_rl.planning.layout_search.search import Search"),
        ("sampling/schedule_types.py", "from megatron_rl.sampling.sampler import Sampler"),
        ("scoring/x.py", "from megatron_rl.scoring.rewards import Rewards"),
        ("roles/x.py", "from megatron_rl.cli import app"),
    ],
)
def test_checker_sees_forbidden_imports(file, source):
    """The rule book bites. Would not catch a rule that is missing from the table."""
    assert forbidden_imports(REPOSITORY / PACKAGE / file, imported_modules(source))


def test_checker_allows_the_pure_parts_to_the_planner():
    """Would not catch a pure part that grows an impure import of its own; importing the planner without torch does."""
    file = REPOSITORY / PACKAGE / "planning" / "x.py"
    assert not forbidden_imports(file, imported_modules("from megatron_rl.parallel.rank_grid import TrainGrid"))


def test_no_cycles_between_rooms():
    """Would not catch imports that are made by name. Floors: rooms in the longest chain of imports."""
    graph: dict[str, set[str]] = {}
    for path in SOURCES:
        room = path.relative_to(REPOSITORY / PACKAGE).with_suffix("").parts[0]
        rooms = {module.split(".")[1] for module in imported_by(path) if module.startswith(f"{PACKAGE}.")}
        graph.setdefault(room, set()).update((rooms & TOP) - {room})
    floors: dict[str, int] = {}
    for room in TopologicalSorter(graph).static_order():
        floors[room] = 1 + max((floors[below] for below in graph.get(room, ())), default=0)
    assert max(floors.values()) <= MOST_FLOORS, sorted(floors.items(), key=lambda floor: floor[1])


def test_no_circles_of_files():
    """Imports for type checkers count too. Would not catch two files that reach for each other through an argument."""
    modules = {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__") for path in SOURCES
    }
    graph = {}
    for path in SOURCES:
        module = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        imported = set(imported_by(path)) & modules
        packages = {name.rpartition(".")[0] for name in imported}  # of `from package import module`
        graph[module] = imported - packages - {module}
    TopologicalSorter(graph).prepare()


def import_rooms(rooms: tuple[str, ...], absent: tuple[str, ...]) -> subprocess.CompletedProcess:
    """Import every module of `rooms` in a fresh process in which the libraries `absent` cannot be found."""
    modules = [
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        for path in SOURCES
        if is_in(room_of(path), rooms) and not room_of(path).startswith("scoring.") and path.stem != "__main__"
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


@pytest.mark.exhaustive
def test_absent_libraries_really_are_absent():
    """The harness of the test above refuses a room that needs Ray. Would not catch one that only looks for it."""
    finished = import_rooms(("cluster",), ("ray",))
    assert finished.returncode != 0 and "ray" in finished.stderr
