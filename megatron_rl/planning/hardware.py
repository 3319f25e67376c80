"""Rates of one GPU and its links, read from a small file: data-sheet numbers, and two calibrated shares.

`megatron-rl profile` writes such a file for the machine at hand, with what no data sheet says: overheads in addition
FLOPs and bytes, latencies of collectives, and how many ranks can compute at the same time.
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
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import ConfigError

FOLDER = Path(__file__).parent / "gpus"
SUFFIXES = (".yaml", ".yml")
"""Suffixes of a user's own file."""


@dataclass(frozen=True)
class Overheads:
    """Seconds in addition to FLOPs and bytes, of a rank that has a device, or a core, of its own.

    score_*: forward pass; update_*: forward and backward. _pass: per micro-batch and stage; _layer: per micro-batch and
    layer; _token: per token, layer and unit of the hidden size. context_layer, context_token: forward attention of a
    layer to the keys of each other context-parallel rank, per micro-batch, and per token of this rank and unit of the
    hidden size. optimizer_step, optimizer_layer: per optimizer step, and per layer in it. generation: per batch;
    request: per response. engine_step, engine_layer, engine_sequence: per decode step, and per layer and sequence in
    it; engine_step None: `step_load.DECODE_OVERHEAD`. transition: per resharding. call: controller, per rank that it
    calls. launch: a layer's kernels in a forward pass, launched while earlier ones compute.
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
    """One GPU. Bytes, dense FLOP/s, bytes/s; links and network count one direction, per GPU.

    memory_bytes: physical. context_bytes: memory of CUDA, NCCL and their kernels, which no allocator sees.
    host_bandwidth: between a GPU and its host's memory. matmul_efficiency: share of the peak that long training
    reaches. expert_share: share of that, and of the memory bandwidth, that experts reach. Both are calibrated
    (scripts/published); all else is from data sheets.

    `profile` adds: half_rows: rows of a matrix product at which it reaches half of its rate. attention_share: share of
    that rate that attention reaches. parallel_ranks: ranks of a machine that can compute at the same time; 0: each has
    its own device. turns_share: share of their speed that is left while more ranks want to compute. collectives,
    engine_collectives: group size -> seconds of the smallest collective, in training and in the engine. error: share by
    which a phase may differ from its plan.
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
        """Whether the file has more than FLOPs and bytes, so that n parts of work may take more than the whole."""
        measured = (self.half_rows, self.parallel_ranks, self.collectives, self.engine_collectives)
        return any(measured) or self.overheads != Overheads()

    def flops(self, dtype: str) -> float:
        """Return the peak FLOP/s of matrix products in a dtype; both 16-bit types have the same."""
        return self.float32_flops if dtype == "float32" else self.bfloat16_flops

    def crowding(self, num_ranks: float) -> float:
        """Return by which factor ranks are slower when `num_ranks` of a machine compute at the same time."""
        if not self.parallel_ranks or num_ranks <= self.parallel_ranks:
            return 1.0
        return num_ranks / (self.parallel_ranks * self.turns_share)


def latency(table: Mapping[int, float], size: int) -> float:
    """Return the seconds of the smallest collective of `size` ranks; 0 for one rank, and where nothing is measured.

    Sizes that were not measured are interpolated or extrapolated over the logarithm of the size.
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
    """Return the names of the files that come with the package."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def default_hardware(device: str) -> str:
    """Return the name of the default hardware. device: trainer.device."""
    return "cpu" if device == "cpu" else "h100"


NETWORK_BYTES, GRAPH_BYTES = 3.0e9, 2.0e9
"""Estimates: what NCCL takes in addition for groups that span nodes, and what captured graphs take."""


def planned_hardware(config: RunConfig, named: str | None = None, num_nodes: int | None = None) -> Hardware:
    """Load the hardware of a plan: as named, else `trainer.hardware_file`, else the default. Raises ConfigError.

    On GPUs context_bytes are those of this run: with NCCL's over nodes and with captured graphs, where it has them.
    num_nodes: of the run; None: trainer.nnodes.
    """
    trainer = config.trainer
    hardware = load_hardware(named or trainer.hardware_file or default_hardware(trainer.device))
    if trainer.device == "cpu":
        return hardware
    across = NETWORK_BYTES if (num_nodes or trainer.nnodes) > 1 else 0.0
    graphs = GRAPH_BYTES if config.generates and not config.actor_rollout_ref.rollout.enforce_eager else 0.0
    return dataclasses.replace(hardware, context_bytes=hardware.context_bytes + across + graphs)


def load_hardware(name: str) -> Hardware:
    """Load hardware by name, or from a user's YAML file. Raises ConfigError if there is none or it does not have a
    number."""
    file = Path(name) if name.endswith(SUFFIXES) else FOLDER / f"{name}.yaml"
    if name.endswith(SUFFIXES) and not file.is_file():
        known = ", ".join(known_hardware())
        way = f"megatron-rl profile writes one for this machine; these names need none: {known}"
        raise ConfigError(f"there is no hardware file {name}; {way}")
    if not file.is_file():
        nearest = nearest_name(name, known_hardware())
        raise ConfigError(
            f"hardware {name} must be one of {', '.join(known_hardware())}, or a YAML file; did you mean: {nearest}"
        )
    return read_hardware(read_tree(file, "numbers of a GPU"), file)


TABLES = ("collectives", "engine_collectives")
NOTES = "measured"
"""A key that may hold anything: the measurements, for people."""


def read_hardware(values: dict[str, Any], file: Path) -> Hardware:
    """Check a file's content. Raises ConfigError with the keys that are missing or wrong."""
    apart = {"name", "overheads", *TABLES}
    missing = dataclasses.MISSING
    needed = {each.name: each.default is missing for each in dataclasses.fields(Hardware) if each.name not in apart}
    groups = {name: values.get(name) or {} for name in ("overheads", *TABLES)}
    allowed = {each.name for each in dataclasses.fields(Overheads)}
    numbers = {key: value for key, value in values.items() if key not in {*groups, NOTES}}
    positive = [key for key, is_needed in needed.items() if is_needed or key.endswith("_share")]
    wrong = [key for key, value in numbers.items() if key not in needed or not _is(value, key in positive)]
    wrong += [name for name, group in groups.items() if not isinstance(group, dict)]
    if not wrong:
        overheads = groups["overheads"].items()
        wrong += [f"overheads.{key}" for key, value in overheads if key not in allowed or not _is(value)]
        wrong += [
            f"{name}.{size}"
            for name in TABLES
            for size, value in groups[name].items()
            if not (isinstance(size, int) and size > 1 and _is(value))
        ]
    lacking = [key for key, is_needed in needed.items() if is_needed and key not in values]
    if wrong or lacking:
        raise ConfigError(
            f"{file} must give finite numbers for {', '.join(needed)}, of these {', '.join(positive)} > 0; it is "
            "missing "
            f"{', '.join(lacking) or 'none'}, and "
            f"{', '.join(map(str, wrong)) or 'nothing'} in it cannot be used"
        )
    given: dict[str, Any] = {key: float(value) for key, value in numbers.items()}
    given["overheads"] = Overheads(**{key: float(value) for key, value in groups["overheads"].items()})
    tables: dict[str, Any] = {name: {size: float(value) for size, value in groups[name].items()} for name in TABLES}
    return Hardware(file.stem, **given, **tables)


def _is(value: object, is_positive: bool = False) -> bool:
    """Return whether a value is a finite number, or a positive one."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        return False
    return value > 0 or not is_positive
