"""Published seconds with known settings, read from `cases/*.yaml`, and the clock's estimate of each.

Every point names its source, its model, GPUs and layout, what is asked of them, and the phases whose seconds were
published. `sets` marks the points that calibrate a number of the clock; all others are held out. Those of
`unseen/*.yaml` were read later, when all numbers stood.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from published.ahead import seconds_ahead

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.planning.hardware import FOLDER, Hardware, load_hardware
from megatron_rl.planning.layout_sizes import Layout
from megatron_rl.planning.step_load import Load
from megatron_rl.planning.time import BF16, LINK_EFFICIENCY, Estimator, ModelCost

HERE = Path(__file__).parent
MODELS = (HERE.parents[1] / "configs" / "models", HERE / "models")
PASSES = ("log-prob", "ref", "values", "rewards")
UPDATES = ("train", "critic")


@dataclass(frozen=True)
class Point:
    """One published number: seconds, or, with `against`, seconds of one layout over those of another.

    phases: of the estimate, that add up to it; roles beside the actor are of its size. drawing: GPUs that generate,
    where others train; 0: all do both. ahead: steps that they run ahead, with weights that arrive in flight; 0: in
    turns. cache_share: of memory, for the engine's weights and cache; 0: enough. searched: where the source has looked
    for the best layout and does not name it, those of which the fastest by the clock counts. sets: the number that this
    point calibrates.
    """

    name: str
    source: str
    cluster: str
    model: ModelCost
    hardware: Hardware
    layout: Layout
    load: Load
    published: float
    phases: tuple[str, ...]
    drawing: int = 0
    ahead: int = 0
    cache_share: float = 0.0
    against: Layout | None = None
    searched: tuple[Layout, ...] = ()
    sets: str | None = None

    def estimate(self, hardware: Hardware | None = None, **changes: Any) -> float:
        """The clock's number; `changes`: other values of the load's fields."""
        load, gpu = dataclasses.replace(self.load, **changes), hardware or self.hardware
        seconds = min(self._seconds(layout, load, gpu) for layout in self.searched or (self.layout,))
        return seconds if self.against is None else seconds / self._seconds(self.against, load, gpu)

    def _seconds(self, layout: Layout, load: Load, gpu: Hardware) -> float:
        training = dataclasses.replace(layout, num_gpus=layout.num_gpus - self.drawing)
        drawing = dataclasses.replace(layout, num_gpus=self.drawing or layout.num_gpus)
        trainer, drawer = Estimator(self.model, training, gpu), Estimator(self.model, drawing, gpu)
        methods: dict[str, Callable[[], float]] = {
            **dict.fromkeys(UPDATES, lambda: trainer.train(load)),
            **dict.fromkeys(PASSES, lambda: trainer.forward(load)),
            "generation": lambda: drawer.generate(self._fitting(load, layout, gpu)),
            "transition": lambda: transition_seconds(self.model, layout, gpu),
        }
        seconds = {phase: methods[phase]() for phase in self.phases}
        if not self.ahead:
            return sum(seconds.values())
        sent = transfer_seconds(self.model.num_params * BF16, training.num_gpus, layout.rollout_tp, gpu)
        in_turns = {"transition": sent, "generation": seconds.pop("generation"), "training": sum(seconds.values())}
        return seconds_ahead(drawer, self._fitting(load, layout, gpu), training.num_gpus, self.ahead, in_turns)

    def _fitting(self, load: Load, layout: Layout, gpu: Hardware) -> Load:
        """With as many sequences of a replica at once as its cache holds."""
        if not self.cache_share:
            return load
        room = self.cache_share * gpu.memory_bytes * layout.rollout_tp - self.model.num_params * BF16
        fitting = int(room / self.model.kv_bytes_per_token / (load.prompt + load.response / 2))
        return dataclasses.replace(load, max_seqs=max(1, min(load.max_seqs, fitting)))


def transition_seconds(model: ModelCost, layout: Layout, gpu: Hardware) -> float:
    """Seconds of a transition in place over the network, by HybridFlow's Table 2: a rank receives what it lacks."""
    lacking = 1 / layout.rollout_tp - 1 / (layout.tp * layout.pp)
    return model.num_params * BF16 * lacking / gpu.network_bandwidth / LINK_EFFICIENCY


def transfer_seconds(num_bytes: float, senders: int, rollout_tp: int, gpu: Hardware) -> float:
    """Seconds of a transfer to other ranks: each receives its shard, and the senders share the model between them."""
    return num_bytes / min(rollout_tp, senders) / gpu.network_bandwidth / LINK_EFFICIENCY


@cache
def cost(name: str) -> ModelCost:
    """A model whose config.json comes with the project, or with these cases."""
    return ModelCost.of(ModelFolder(next(folder / name for folder in MODELS if (folder / name).is_dir())).model)


@cache
def hardware_of(name: str) -> Hardware:
    """One of the package's, or of a cluster that is only described here."""
    own = (FOLDER / f"{name}.yaml").is_file()
    return load_hardware(name if own else str(HERE / "hardware" / f"{name}.yaml"))


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`more` over `base`, group by group."""
    found = dict(base)
    for key, value in more.items():
        found[key] = merged(found[key], value) if isinstance(value, dict) and key in found else value
    return found


@cache
def points() -> tuple[Point, ...]:
    """All of `cases`, those that calibrate first, then file by file."""
    found = [point for file in sorted((HERE / "cases").glob("*.yaml")) for point in _of_file(file)]
    return tuple(sorted(found, key=lambda point: point.sets is None))


@cache
def unseen_points() -> tuple[Point, ...]:
    """All of `unseen`, file by file."""
    return tuple(point for file in sorted((HERE / "unseen").glob("*.yaml")) for point in _of_file(file))


def _of_file(file: Path) -> Iterator[Point]:
    content = yaml.safe_load(file.read_text())
    inner = ("source", "points", "groups", "models", "system", "defaults")
    for group in content.get("groups", [content]):
        defaults = content.get("defaults", {})
        if group is not content:
            defaults = merged(defaults, group.get("defaults", {}))
        assert set(group) <= set(inner), f"{file}: {set(group) - set(inner)}"
        for row in group["points"]:
            values = merged(defaults, row)
            sizes = content.get("models", {}).get(values["model"])
            model = _written(sizes) if sizes else cost(values["model"])
            yield _point(content["system"], group["source"], values, model)


def _written(sizes: Mapping[str, Any]) -> ModelCost:
    """A model of a family that is not built here, from its sizes; keys and values are as many as queries."""
    return ModelCost(**{"kv_bytes_per_token": 4 * sizes["num_layers"] * sizes["hidden"], **sizes})


def _point(system: str, source: str, values: Mapping[str, Any], model: ModelCost) -> Point:
    gpu = hardware_of(values["hardware"])
    sizes = (values["gpus"], values["per_node"])
    given: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.get("layout", {}).items()
    }
    layout = Layout(*sizes, **given)
    against = Layout(*sizes, **values["against"]) if "against" in values else None
    searched = tuple(Layout(*sizes, **one) for one in values.get("searched", []))
    load = _load(values)
    published = values.get("seconds", values.get("ratio", 0.0))
    if "rate" in values:  # tokens/s/GPU
        published = load.num_tokens / values["rate"] / values["gpus"]
    phases = tuple(values["phases"])
    what = "" if len(phases) > 3 else " + ".join(phases)
    ahead = values.get("ahead", 0)
    parts = (system, values.get("name", ""), values["model"], what or "step", f"{ahead} off" if ahead else "")
    name = f"{' '.join(part for part in parts if part)}, {values['gpus']} {gpu.name.upper()}"
    cluster = f"{system} {gpu.name.upper()}"
    extra = (values.get("drawing", 0), ahead, values.get("cache_share", 0.0), against, searched, values.get("sets"))
    return Point(name, source, cluster, model, gpu, layout, load, published, phases, *extra)


def _load(values: Mapping[str, Any]) -> Load:
    """Published systems hide data-parallel traffic."""
    asked = dict(values["load"])
    rows, longest = asked.pop("rows", None), asked.pop("longest", asked["prompt"] + asked["response"])
    asked.setdefault("mini_batch", asked["num_samples"])
    asked.setdefault("max_response", longest - asked["prompt"])
    if rows is not None:
        asked["block_tokens"] = rows * (asked["prompt"] + asked["response"])
    return Load(overlaps_dp=True, **asked)
