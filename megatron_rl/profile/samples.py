"""Tasks and samples of a profile: plain data that goes to the processes of ranks and comes back. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

SCORE, UPDATE, GENERATE = "score", "update", "generate"
"""Kinds of samples of roles."""
SCORE_ALONE = "score alone"
"""A SCORE of one data-parallel group while the others wait."""
MATMUL, ATTENTION, COPY, HOST_COPY, SMALL, ALL_REDUCE = (
    *("matmul", "attention", "copy", "host copy", "small operations", "all-reduce"),
)
"""Kinds of kernels."""
WIDTH = {"cpu": 1024, "cuda": 4096}
"""Columns of the square matrix that rows are multiplied with."""
HEADS, HEAD_SIZE = 8, 64
"""Heads and their size in measurements of attention."""


@dataclass(frozen=True)
class MeasuredSample:
    """Seconds of one operation: the lower quartile of several calls.

    kind: SCORE, UPDATE, GENERATE, or a kernel's name. rows, prompt, response: samples of one data-parallel rank, or
    replica, and their tokens. size: of a kernel, or bytes of an all-reduce of all ranks.
    """

    kind: str
    seconds: float
    rows: int = 0
    prompt: int = 0
    response: int = 0
    size: float = 0


@dataclass(frozen=True)
class Case:
    """Samples to measure a role with."""

    rows: int
    prompt: int
    response: int


@dataclass(frozen=True)
class MeasuringTask:
    """Measurements that every rank of one world makes. tp_size: of training and of the engine. cp_size: of training.

    kernels: also measure matrix products, attention, memory and an all-reduce. alone: also measure passes of one
    data-parallel group while the others wait.
    """

    device: str
    model: str
    num_layers: int
    tp_size: int
    world_size: int
    kernels: bool = False
    passes: tuple[Case, ...] = ()
    generations: tuple[Case, ...] = ()
    repeats: int = 5
    alone: bool = False
    cp_size: int = 1

    @property
    def sharing(self) -> int:
        """Ranks that share the samples of a data-parallel rank."""
        return self.tp_size * self.cp_size


@dataclass(frozen=True)
class World:
    """A task and its samples, each of the slowest rank."""

    task: MeasuringTask
    samples: list[MeasuredSample] = field(default_factory=list)

    def of(self, *kinds: str) -> list[MeasuredSample]:
        """Return the samples of some kinds."""
        return [sample for sample in self.samples if sample.kind in kinds]


def slowest(ranks: Sequence[Sequence[MeasuredSample]]) -> list[MeasuredSample]:
    """Return the slowest rank's measurement of every sample. All ranks must have measured the same samples."""
    return [max(same, key=lambda sample: sample.seconds) for same in zip(*ranks, strict=True)]
