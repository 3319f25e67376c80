"""A good configuration with files of its own, and how single faults to break it with are written down."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from model_folders import EXPERTS, REWARD, write_model, write_prompts

from megatron_rl.config.keys import put
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import RunConfig

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MEGATRON, MODEL = f"{ACTOR}.megatron", "actor_rollout_ref.model.path"
TP, PP = f"{MEGATRON}.tensor_model_parallel_size", f"{MEGATRON}.pipeline_model_parallel_size"
CP = f"{MEGATRON}.context_parallel_size"
WAY = f"{MEGATRON}.override_transformer_config.cp_comm_type"
EP, ETP = f"{MEGATRON}.expert_model_parallel_size", f"{MEGATRON}.expert_tensor_parallel_size"
VPP = f"{MEGATRON}.virtual_pipeline_model_parallel_size"
FIRST, LAST = f"{MEGATRON}.num_layers_in_first_pipeline_stage", f"{MEGATRON}.num_layers_in_last_pipeline_stage"
RECOMPUTE = f"{MEGATRON}.override_transformer_config.recompute"
GRANULARITY, METHOD, NUMBER, MODULES = (
    f"{RECOMPUTE}_{name}" for name in ("granularity", "method", "num_layers", "modules")
)
ROLLOUT_TP, ROLLOUT_EP = f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.expert_parallel_size"
ROLLOUT_DP = f"{ROLLOUT}.data_parallel_size"
GPUS = "trainer.n_gpus_per_node"
CORRECTION = "algorithm.rollout_correction"

Said = tuple[str, str]
"""First key of a violation, and a part of its rule or of what it calls the settings."""


@dataclass
class Case:
    """A configuration with files of its own."""

    config: RunConfig
    folder: Path

    def put(self, **by_name: object) -> None:
        """Keys with "__" for a dot."""
        for name, value in by_name.items():
            put(self.config, name.replace("__", "."), value)

    def set(self, values: dict[str, object]) -> None:
        for key, value in values.items():
            put(self.config, key, value)

    def model(self, **changes: object) -> None:
        """Change config.json of the actor's model; None takes a key out."""
        file = self.folder / "model" / "config.json"
        settings = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


@dataclass(frozen=True)
class Fault:
    """`breaks` applies it and returns what preflight must say; `offer`: whether each violation offers a value."""

    name: str
    areas: frozenset[str]
    breaks: Callable[[Case, Random], list[Said]]
    offer: bool = True
    experts: bool | None = None


CATALOGUE: list[Fault] = []


def fault(areas: str, *, offer: bool = True, experts: bool | None = False):
    """Put a function into the catalogue. experts: for a model with experts, without, or for either (None)."""

    def register(breaks: Callable[[Case, Random], list[Said]]) -> None:
        CATALOGUE.append(Fault(breaks.__name__, frozenset(areas.split()), breaks, offer, experts))

    return register


def values(name: str, areas: str, changes: dict[str, object], *said: Said, offer: bool = True, experts=None) -> None:
    """A fault that is nothing but values; its keys are areas, too."""

    def breaks(case: Case, rng: Random) -> list[Said]:
        case.set(changes)
        return list(said)

    CATALOGUE.append(Fault(name, frozenset([*areas.split(), *changes]), breaks, offer, experts))


def good_case(folder: Path, base: RunConfig, experts: bool) -> Case:
    """A configuration without faults, and its files."""
    config = copy.deepcopy(base)
    write_model(folder / "model", **(EXPERTS if experts else {}))
    for name in ("train.parquet", "test.parquet"):
        write_prompts(folder / name)
    (folder / "reward.py").write_text(REWARD)
    case = Case(config, folder)
    case.set({MODEL: str(folder / "model"), "custom_reward_function.path": str(folder / "reward.py")})
    case.set({"data.train_files": str(folder / "train.parquet"), "data.val_files": str(folder / "test.parquet")})
    case.set({"trainer.default_local_dir": str(folder / "out")})
    if experts:
        case.set({GPUS: 12, f"{MEGATRON}.sequence_parallel": True})
    return case


def base_config(folder: Path) -> RunConfig:
    """Six ranks, TP2 x PP3; files are put in later."""
    file = folder / "base.yaml"
    file.write_text("data: {train_files: a, val_files: b}\nactor_rollout_ref: {model: {path: m}}\n")
    lengths = ["data.max_prompt_length=16", "data.max_response_length=48", "trainer.device=cpu"]
    return load_config(file, [*lengths, f"{TP}=2", f"{PP}=3", f"{GPUS}=6"])
