"""Which bytes go from which pipeline stage to which: pure data, made once, executed at every transition.

Each stage holds some logical tensors in a flat buffer (`StageLayout`); for generation every stage needs all of them.
The plan cuts what a stage lacks into contiguous runs of its owner's buffer and says where each lands at the receiver.
A tensor that several stages hold (a tied embedding) travels only to those that have no copy, so the bytes a stage
receives are exactly what it needs minus what it holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Elements; every run lands at a multiple of it, as Megatron's buffers start every parameter at one."""


@dataclass(frozen=True)
class Slot:
    """One logical tensor inside a flat buffer; `offset` in elements."""

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class StageLayout:
    """What one pipeline stage holds, in one buffer; slots ordered by offset."""

    slots: tuple[Slot, ...]

    def holds(self, name: str) -> bool:
        return any(slot.name == name for slot in self.slots)


@dataclass(frozen=True)
class Transfer:
    """Elements [start, stop) of stage `source`'s buffer, to land at `landing[stage]` in each receiver's buffer."""

    source: int
    start: int
    stop: int
    landing: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def receivers(self) -> tuple[int, ...]:
        return tuple(stage for stage, _ in self.landing)

    def offset_at(self, stage: int) -> int:
        return dict(self.landing)[stage]


@dataclass(frozen=True)
class PipelinePlan:
    """Everything one transition moves inside a pipeline group.

    foreign[stage]: slots of that stage's receive buffer; foreign_numel[stage]: its size in elements.
    """

    num_stages: int
    transfers: tuple[Transfer, ...]
    foreign: tuple[tuple[Slot, ...], ...]
    foreign_numel: tuple[int, ...]

    def numel_received(self, stage: int) -> int:
        return sum(transfer.numel for transfer in self.transfers if stage in transfer.receivers)


def numel_lacking(layouts: Sequence[StageLayout], stage: int) -> int:
    """The lower bound: elements of all distinct tensors minus those the stage holds."""
    whole = {slot.name: slot.numel for layout in layouts for slot in layout.slots}
    return sum(numel for name, numel in whole.items() if not layouts[stage].holds(name))


def make_plan(layouts: Sequence[StageLayout], bucket_numel: int) -> PipelinePlan:
    """Plan the exchange after which every stage holds every tensor; `bucket_numel` bounds one transfer.

    The lowest stage that holds a tensor sends it.
    """
    stages = range(len(layouts))
    foreign: list[list[Slot]] = [[] for _ in stages]
    cursor = [0 for _ in stages]
    transfers: list[Transfer] = []
    sent: set[str] = set()
    for source in stages:
        mine = [slot for slot in layouts[source].slots if slot.name not in sent]
        sent |= {slot.name for slot in mine}
        for run, receivers in contiguous_runs(mine, source, layouts):
            start, stop = run[0].offset, run[-1].stop
            for stage in receivers:
                foreign[stage] += [Slot(s.name, cursor[stage] + s.offset - start, s.shape) for s in run]
            transfers += buckets(source, start, stop, {stage: cursor[stage] for stage in receivers}, bucket_numel)
            for stage in receivers:
                cursor[stage] += -(-(stop - start) // ALIGNMENT) * ALIGNMENT
    return PipelinePlan(len(layouts), tuple(transfers), tuple(map(tuple, foreign)), tuple(cursor))


def contiguous_runs(slots: Sequence[Slot], source: int, layouts: Sequence[StageLayout]):
    """(slots without a gap between them, the stages that lack them all) in buffer order; nobody lacking: left out."""
    run: list[Slot] = []
    run_receivers: tuple[int, ...] = ()
    for slot in sorted(slots, key=lambda slot: slot.offset):
        receivers = tuple(
            stage for stage in range(len(layouts)) if stage != source and not layouts[stage].holds(slot.name)
        )
        if run and (run[-1].stop != slot.offset or receivers != run_receivers):
            if run_receivers:
                yield run, run_receivers
            run = []
        run.append(slot)
        run_receivers = receivers
    if run and run_receivers:
        yield run, run_receivers


def buckets(source: int, start: int, stop: int, landing: dict[int, int], bucket_numel: int) -> list[Transfer]:
    """One run cut into transfers of at most `bucket_numel` elements."""
    return [
        Transfer(
            source,
            begin,
            min(begin + bucket_numel, stop),
            tuple((stage, offset + begin - start) for stage, offset in landing.items()),
        )
        for begin in range(start, stop, bucket_numel)
    ]
