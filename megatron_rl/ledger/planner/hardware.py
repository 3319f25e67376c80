"""What one GPU and its links can do, from a small file: data-sheet numbers, and one share that is calibrated.

`megatron-rl profile` writes such a file for the machine at hand, with what no data sheet says: seconds that come on top
of FLOPs and bytes, the latency of collectives, and how many ranks can work at once.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.config.load import read_tree
from megatron_rl.config.problems import nearest_name
from megatron_rl.config.trainer import TrainerConfig
from megatron_rl.errors import ConfigError

FOLDER = Path(__file__).parent / "gpus"
SUFFIXES = (".yaml", ".yml")
"""How the name of a user's own file must end."""


@dataclass(frozen=True)
class Overheads:
    """Seconds that come on top of FLOPs and bytes, of a rank that has its device, or a core, to itself.

    score_*: of a forward pass, update_*: of forward and backward: _pass of each micro-batch on each stage, _layer of
    each of its layers, _token of each token, layer and unit of the hidden size. context_layer, context_token: of a
    layer's attention to the keys of each other context-parallel rank, forward; the latter of each token of this rank
    and unit of the hidden size. optimizer_step, optimizer_layer: of one optimizer step. generation: of each time that a
    batch is drawn; request: of each of its answers. engine_step, engine_layer, engine_sequence: of a decode step, each
    of its layers and sequences; engine_step None takes what is calibrated (`time.DECODE_OVERHEAD`). transition: of one.
    call: of the controller, for each rank that it calls. launch: of a layer's kernels in a forward pass, which run
    beside the computing of those before them.
    """

    score_pass: float = 0.0
    score_layer: float = 0.0
    score_token: float = 0.0
    update_pass: float = 0.0
    update_layer: float = 0.0
    update_token: float = 0.0
    context_layer: float = 0.0
    context_token: float = 0.0
    optimizer_step: float = 0.0
    optimizer_layer: float = 0.0
    generation: float = 0.0
    request: float = 0.0
    engine_step: float | None = None
    engine_layer: float = 0.0
    engine_sequence: float = 0.0
    transition: float = 0.0
    call: float = 1e-3
    launch: float = 1e-4


@dataclass(frozen=True)
class Hardware:
    """One GPU. Bytes, FLOP/s without sparsity, bytes/s; links and network count one direction, per GPU.

    memory_bytes: physical. context_bytes: what CUDA, NCCL and their kernels keep of it, which no allocator sees.
    host_bandwidth: between a GPU and its host's memory. matmul_efficiency: share of the peak that long training
    reaches. expert_share: part of that, and of memory's speed, that experts reach. Both are calibrated
    (scripts/published); all else is data sheet.

    What `profile` adds: half_rows: rows of a matrix product at which it reaches half of that; attention_share: part of
    it that attention reaches. parallel_ranks: ranks of a machine that can work at once, while more of them take turns,
    and turns_share of what these could do is then done; 0: each has a device of its own. collectives,
    engine_collectives: size of a group -> seconds that a collective takes however small, in training and in the
    engine. error: the share by which a phase may differ from its plan.
    """

    name: str
    memory_bytes: float
    bfloat16_flops: float
    float32_flops: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    matmul_efficiency: float
    context_bytes: float = 2.0e9
    host_bandwidth: float = 25.0e9
    expert_share: float = 1.0
    half_rows: float = 0.0
    attention_share: float = 1.0
    parallel_ranks: float = 0.0
    turns_share: float = 1.0
    error: float = 0.3
    collectives: Mapping[int, float] = field(default_factory=dict, hash=False)
    engine_collectives: Mapping[int, float] = field(default_factory=dict, hash=False)
    overheads: Overheads = Overheads()

    @property
    def is_measured(self) -> bool:
        """Whether it says more than FLOPs and bytes, so that work cut into more parts may take more than its share."""
        told = (self.half_rows, self.parallel_ranks, self.collectives, self.engine_collectives)
        return any(told) or self.overheads != Overheads()

    def flops(self, dtype: str) -> float:
        """Peak of matrix products in a dtype; that of both types of 16 bits is one."""
        return self.float32_flops if dtype == "float32" else self.bfloat16_flops

    def crowding(self, num_ranks: float) -> float:
        """How many times as long ranks take when so many of a machine work at once."""
        if not self.parallel_ranks or num_ranks <= self.parallel_ranks:
            return 1.0
        return num_ranks / (self.parallel_ranks * self.turns_share)


def latency(table: Mapping[int, float], size: int) -> float:
    """Seconds of a collective of so many ranks, however small: between two measured sizes, and beyond them, along the
    logarithm of the size. 0 for one rank, and where nothing is measured.
    """
    if size == 1 or not table:
        return 0.0
    known = sorted({1: 0.0, **table}.items())
    low, high = known[-2:]
    for before, after in zip(known, known[1:], strict=False):
        if before[0] <= size <= after[0]:
            low, high = before, after
            break
    share = math.log(size / low[0]) / math.log(high[0] / low[0])
    return max(0.0, low[1] + share * (high[1] - low[1]))


def known_hardware() -> list[str]:
    """Names of the files that come with the package."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def default_hardware(device: str) -> str:
    """What a plan is made for where nothing else is said. device: trainer.device."""
    return "cpu" if device == "cpu" else "h100"


def planned_hardware(trainer: TrainerConfig, named: str | None = None) -> Hardware:
    """What a run's plan is made for: as named, else the run's hardware file, else the default. Raises ConfigError."""
    return load_hardware(named or trainer.hardware_file or default_hardware(trainer.device))


def load_hardware(name: str) -> Hardware:
    """By name, or from a YAML file of the user's. Raises ConfigError when there is none or it lacks a number."""
    file = Path(name) if name.endswith(SUFFIXES) else FOLDER / f"{name}.yaml"
    if not file.is_file():
        nearest = nearest_name(name, known_hardware())
        raise ConfigError(
            f"hardware {name} must be one of {', '.join(known_hardware())}, or a YAML file; nearest: {nearest}"
        )
    return read_hardware(read_tree(file, "numbers of a GPU"), file)


TABLES = ("collectives", "engine_collectives")
NOTES = "measured"
"""A key that may hold anything: what was measured, for people."""


def read_hardware(values: dict[str, Any], file: Path) -> Hardware:
    """From a file's content. Raises ConfigError with the keys that are lacking or wrong."""
    needed = {one.name: _is_needed(one) for one in dataclasses.fields(Hardware)}
    for name in ("name", "overheads", *TABLES):
        del needed[name]
    groups = {name: values.get(name) or {} for name in ("overheads", *TABLES)}
    allowed = {one.name for one in dataclasses.fields(Overheads)}
    numbers = {key: value for key, value in values.items() if key not in {*groups, NOTES}}
    positive = [key for key, is_needed in needed.items() if is_needed or key.endswith("_share")]
    wrong = [key for key, value in numbers.items() if key not in needed or not _is(value, key in positive)]
    wrong += [name for name, group in groups.items() if not isinstance(group, dict)]
    if not wrong:
        told = groups["overheads"].items()
        wrong += [f"overheads.{key}" for key, value in told if key not in allowed or not _is(value)]
        wrong += [
            f"{name}.{size}"
            for name in TABLES
            for size, value in groups[name].items()
            if not (isinstance(size, int) and size > 1 and _is(value))
        ]
    lacking = [key for key, is_needed in needed.items() if is_needed and key not in values]
    if wrong or lacking:
        raise ConfigError(
            f"{file} must give finite numbers for {', '.join(needed)}, of these {', '.join(positive)} > 0; it lacks "
            f"{', '.join(lacking) or 'none'}, and "
            f"{', '.join(map(str, wrong)) or 'nothing'} in it cannot be used"
        )
    given: dict[str, Any] = {key: float(value) for key, value in numbers.items()}
    overheads = Overheads(**{key: float(value) for key, value in groups["overheads"].items()})
    tables: dict[str, Any] = {name: {size: float(value) for size, value in groups[name].items()} for name in TABLES}
    return Hardware(file.stem, **given, **tables, overheads=overheads)


def _is(value: object, is_positive: bool = False) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        return False
    return value > 0 or not is_positive


def _is_needed(one: dataclasses.Field[Any]) -> bool:
    return one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
