"""Megatron layouts that the roles of a pool can share, axis by axis. A new axis is one more function in `AXES`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron_rl.config.megatron import COUNTED_PARTS, MegatronConfig
from megatron_rl.config.problems import divisors
from megatron_rl.planning.folder_checks import ModelSizes
from megatron_rl.planning.stage_rules import spreads

CHUNKS = (2, 3, 4, 5, 8)
"""Numbers of model chunks of a stage that are tried, in addition to 1."""
MOST_EXPERT_RANKS = 64
MOST_CONTEXT_RANKS = 16


@dataclass(frozen=True)
class GridShape:
    """Size of a pool: machines, and ranks of each."""

    num_nodes: int
    per_node: int

    @cached_property
    def num_ranks(self) -> int:
        return self.num_nodes * self.per_node


@dataclass(frozen=True)
class Grid:
    """One training layout. first, last: layers of these stages; None: an even share. etp: TP of experts; None: tp."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    first: int | None = None
    last: int | None = None
    ep: int = 1
    etp: int | None = None
    sequence_parallel: bool = False
    cp: int = 1

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Names of `MegatronConfig` -> values of this layout."""
        return {
            "tensor_model_parallel_size": self.tp,
            "context_parallel_size": self.cp,
            "dynamic_context_parallel": False,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp,
            "num_layers_in_first_pipeline_stage": self.first,
            "num_layers_in_last_pipeline_stage": self.last,
            **dict.fromkeys(COUNTED_PARTS, False),
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
            "sequence_parallel": self.sequence_parallel,
        }

    @cached_property
    def megatron(self) -> MegatronConfig:
        """A configuration with this layout; its other values have no meaning."""
        return MegatronConfig(**self.settings)

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    def __str__(self) -> str:
        sizes = {"TP": self.tp, "CP": self.cp, "PP": self.pp, "VPP": self.vpp or 1, "EP": self.ep}
        shown = [f"{name}{size}" for name, size in sizes.items() if size > 1 or name in ("TP", "PP")]
        ends = [f"{name} {size}" for name, size in (("first", self.first), ("last", self.last)) if size is not None]
        return " ".join([*shown, *ends, *([f"ETP{self.etp}"] if self.etp is not None else [])])


@dataclass(frozen=True)
class Room:
    """Limits of a layout: the models of a pool, its ranks, and whether activations are split over TP ranks.

    a2a_heads: attention heads of the models whose context parallelism exchanges tokens for heads.
    """

    models: tuple[ModelSizes, ...]
    shape: GridShape
    sequence_parallel: bool
    a2a_heads: tuple[int, ...] = ()


def tensor_axis(grid: Grid, room: Room) -> Iterator[Grid]:
    """Yield the TP sizes inside of a node that divide all models evenly."""
    common = math.gcd(*(model.max_tp for model in room.models))
    has_experts = any(model.num_experts for model in room.models)
    for tp in divisors(math.gcd(common, room.shape.num_ranks)):
        if tp <= room.shape.per_node:
            yield replace(grid, tp=tp, sequence_parallel=room.sequence_parallel or (has_experts and tp > 1))


def pipeline_axis(grid: Grid, room: Room) -> Iterator[Grid]:
    """Yield the PP sizes: even stages with 1 or more chunks, a shorter last stage, shorter first and last stages."""
    num_layers = {model.num_hidden_layers for model in room.models}
    for pp in divisors(room.shape.num_ranks // grid.tp):
        if pp > max(num_layers):
            return
        tried = [replace(grid, pp=pp)]
        tried += [replace(grid, pp=pp, vpp=vpp) for vpp in CHUNKS if pp > 1]
        if len(num_layers) == 1:
            tried += [replace(grid, pp=pp, first=first, last=last) for first, last in shorter_ends(max(num_layers), pp)]
        yield from (one for one in tried if spreads(room.models, one.megatron))


def shorter_ends(num_layers: int, pp: int) -> Iterator[tuple[int | None, int]]:
    """Yield the layers of the first stage (None: an even share) and of the last one: the longest last stage, and the
    longest ends, that are shorter than an even share and leave the other stages even.
    """
    for num_ends in (1, 2):
        if pp <= num_ends:
            continue
        for size in range((num_layers - 1) // pp, 0, -1):
            if (num_layers - num_ends * size) % (pp - num_ends) == 0:
                yield (size if num_ends == 2 else None), size
                break


def expert_axis(grid: Grid, room: Room) -> Iterator[Grid]:
    """Yield the EP sizes, with experts sharded by TP like all else or whole."""
    with_experts = [model for model in room.models if model.num_experts]
    if not with_experts:
        yield grid
        return
    stage_size = room.shape.num_ranks // grid.pp
    for etp in (None, 1) if grid.tp > 1 else (None,):
        size = grid.tp if etp is None else etp
        if stage_size % size or any(model.moe_intermediate_size % size for model in with_experts):
            continue
        for ep in divisors(math.gcd(stage_size // size, *(model.num_experts for model in with_experts))):
            if ep <= MOST_EXPERT_RANKS:
                yield replace(grid, ep=ep, etp=etp)


def context_axis(grid: Grid, room: Room) -> Iterator[Grid]:
    """Yield CP 1 first, then the sizes that divide the copies of the model and whose ranks share a node or fill nodes.

    `AttentionPart.cp_divides` has heads that ranks share.
    """
    yield grid
    shared = [heads for model in room.models for heads in model.attention.cp_divides.values()]
    for cp in divisors(room.shape.num_ranks // (grid.tp * grid.pp))[1:]:
        across, node = grid.tp * cp, room.shape.per_node
        fits = all(heads // grid.tp % cp == 0 for heads in (*room.a2a_heads, *shared))
        if cp <= MOST_CONTEXT_RANKS and fits and (node % across == 0 or across % node == 0):
            yield replace(grid, cp=cp)


Axis = Callable[[Grid, Room], Iterable[Grid]]
AXES: Sequence[Axis] = (tensor_axis, pipeline_axis, expert_axis, context_axis)
"""Each axis takes a layout that the axes before it have set, and yields the layouts that extend it."""


def grids(room: Room) -> list[Grid]:
    """Return every layout that fits."""
    layouts = [Grid()]
    for axis in AXES:
        layouts = [extended for grid in layouts for extended in axis(grid, room)]
    return layouts
