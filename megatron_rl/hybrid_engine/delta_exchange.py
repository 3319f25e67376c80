"""Move by a weight transfer what changed since the last transfer: the owners compare, all ranks learn the counts,
messages go.

A training rank keeps a copy of what it sent last, each element of the model on one rank. A receiver needs its buffer
as the last transfer left it, and keeps the indices of what it passes on until the transfer is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from megatron_rl.hybrid_engine.delta_plan import Unit, UnitKey, grouped, make_delta_plan
from megatron_rl.hybrid_engine.delta_sizes import COUNT_BYTES, Form, Payload, payload_of
from megatron_rl.hybrid_engine.deltas import as_bits, index_of, read_values, view_of, write_values
from megatron_rl.hybrid_engine.exchange import NUM_SCRATCH, BoundStep, StepRunner
from megatron_rl.hybrid_engine.plan import ExchangePlan
from megatron_rl.hybrid_engine.stable_memory import MemoryBuffer
from megatron_rl.hybrid_engine.transport import Transport

WORD_BYTES = 8
ORDER = (Form.POSITIONS, Form.WHOLE, Form.MASK)
"""A message has indices of 4 bytes first, then values, then indices of single bytes. So each part lies aligned."""


class Changes:
    """The changed elements of every unit in one transfer; the same on all ranks.

    counts, numels: of changed and of all elements of each unit, [owner][number]. total: changed elements of the model.
    leaving_bytes: what all owners together send. is_whole: whether every unit travels whole.
    """

    def __init__(self, counts: Sequence[Sequence[int]], numels: Sequence[Sequence[int]], itemsize: int) -> None:
        self._payloads = [
            [payload_of(count, numel, itemsize) for count, numel in zip(mine, sizes, strict=False)]
            for mine, sizes in zip(counts, numels, strict=True)
        ]
        payloads = [payload for mine in self._payloads for payload in mine]
        self.total = sum(map(sum, counts))
        self.leaving_bytes = sum(payload.num_bytes for payload in payloads)
        self.is_whole = all(payload.form is Form.WHOLE for payload in payloads)

    def payload(self, unit: Unit) -> Payload:
        """What travels for a unit."""
        owner, number = unit.key
        return self._payloads[owner][number]

    def bytes_of(self, unit: Unit) -> int:
        """How many bytes travel for a unit."""
        return self.payload(unit).num_bytes


class DeltaExchange(StepRunner):
    """One member's part of the transfers of changes. Arguments: as of `make_schedule` and `Exchange`.

    Every rank of the transport's group must call `compare` and `run` together with all others.
    """

    def __init__(
        self, plan: ExchangePlan, buffers: Mapping[int, Tensor], transport: Transport, message_numel: int
    ) -> None:
        like = next(iter(buffers.values()))
        self._bits = {number: as_bits(buffer) for number, buffer in buffers.items()}
        self._itemsize, self._device = like.element_size(), like.device
        self._plan = make_delta_plan(plan, transport.number, message_numel)
        self._nodes = [member.node for member in plan.members]
        self._owned, self._passed_on = self._plan.owned, self._plan.passed_on
        ways = [way for turn in self._plan.turns for way in (turn.sent, turn.received)]
        size = min(message_numel, max((sum(unit.numel for unit in way) for way in ways), default=0)) * self._itemsize
        self._message_bytes = -(-size // WORD_BYTES) * WORD_BYTES
        super().__init__(transport, MemoryBuffer(NUM_SCRATCH * self._message_bytes, torch.uint8, self._device))
        self.scratch.release()
        self._longest = max(map(len, self._plan.numels))
        self._kept: list[Tensor] = []
        self._indices: dict[UnitKey, Tensor] = {}

    @property
    def kept_bytes(self) -> int:
        """Bytes of the copy of what this rank sent last."""
        return sum(kept.nbytes for kept in self._kept)

    @property
    def count_bytes(self) -> int:
        """Bytes of counts that a rank receives from all others in one transfer."""
        return (self.transport.size - 1) * self._longest * COUNT_BYTES

    @torch.no_grad()
    def remember(self) -> None:
        """Keep a copy of what this rank has just sent whole."""
        if not self._kept and self._owned:
            sizes = [unit.numel for unit in self._owned]
            like = next(iter(self._bits.values()))
            self._kept = list(torch.empty(sum(sizes), dtype=like.dtype, device=self._device).split(sizes))
        for unit, kept in zip(self._owned, self._kept, strict=True):
            kept.view(unit.region.shape).copy_(view_of(self._bits[unit.region.buffer], unit.region))

    @torch.no_grad()
    def compare(self) -> Changes:
        """Find what changed since the last transfer, keep the new values, and learn what changed on all ranks."""
        self._indices = {}
        counts = torch.zeros(self._longest, dtype=torch.int32)
        for unit, kept in zip(self._owned, self._kept, strict=True):
            now, before = view_of(self._bits[unit.region.buffer], unit.region), kept.view(unit.region.shape)
            changed = (now != before).flatten()
            count = int(changed.count_nonzero())
            if count:
                self._indices[unit.key] = index_of(changed, payload_of(count, unit.numel, self._itemsize).form)
                before.copy_(now)
                counts[unit.key[1]] = count
        gathered = self.transport.all_gather(counts)
        return Changes([each.tolist() for each in gathered], self._plan.numels, self._itemsize)

    def bound(self, changes: Changes) -> tuple[int, int]:
        """Bytes of what this rank must receive: in all, and of these from other nodes; without counts."""
        mine, total, far = self._nodes[self.transport.number], 0, 0
        for turn in self._plan.turns:
            size = sum(map(changes.bytes_of, turn.received))
            total += size
            far += size if turn.source is not None and self._nodes[turn.source] != mine else 0
        return total, far

    @torch.no_grad()
    def run(self, changes: Changes) -> None:
        """Move what changed. The buffers of receivers must be as the last transfer left them."""
        try:
            self.take(self._steps(changes))
        finally:
            self._indices = {}

    def _steps(self, changes: Changes) -> list[BoundStep]:
        steps: list[BoundStep] = []
        arrives: dict[UnitKey, int] = {}
        for turn in self._plan.turns:
            out = grouped(turn.sent, changes.bytes_of, self._message_bytes)
            into = grouped(turn.received, changes.bytes_of, self._message_bytes)
            for sent, received in zip_longest(out, into):
                passes = sent is not None and turn.phase > 0
                step = BoundStep(1 + max(arrives[unit.key] for unit in sent) if passes else 0)
                slot = len(steps) % 2
                if sent is not None and turn.dest is not None:
                    parts = self._parts(sent, changes, slot)
                    step.send, step.pack = (parts.message, turn.dest), partial(self._pack, parts)
                if received is not None and turn.source is not None:
                    arrives |= {unit.key: len(steps) for unit in received}
                    parts = self._parts(received, changes, 2 + slot)
                    step.receive, step.unpack = (parts.message, turn.source), partial(self._unpack, parts)
                steps.append(step)
        return steps

    def _parts(self, units: Sequence[Unit], changes: Changes, slot: int) -> DeltaMessage:
        """The parts of a message of some units in a slot of the scratch memory."""
        payloads = [changes.payload(unit) for unit in units]
        message = self.scratch.view(slot * self._message_bytes, (sum(payload.num_bytes for payload in payloads),))
        index, values = [message[:0]] * len(units), [message[:0]] * len(units)
        start = 0
        for part in ORDER:
            for number, payload in enumerate(payloads):
                if part is Form.WHOLE:
                    values[number] = message[start : start + payload.value_bytes]
                    start += payload.value_bytes
                elif part is payload.form:
                    index[number] = message[start : start + payload.index_bytes]
                    start += payload.index_bytes
        return DeltaMessage(message, units, [payload.form for payload in payloads], index, values)

    def _pack(self, parts: DeltaMessage) -> None:
        for unit, form, index, values in parts.each():
            buffer, known = self._bits[unit.region.buffer], self._indices[unit.key]
            index.copy_(known)
            values.view(buffer.dtype).copy_(read_values(buffer, unit.region, form, known))

    def _unpack(self, parts: DeltaMessage) -> None:
        for unit, form, index, values in parts.each():
            buffer = self._bits[unit.region.buffer]
            write_values(buffer, unit.region, form, index, values.view(buffer.dtype))
            if unit.key in self._passed_on:
                self._indices[unit.key] = index.clone()


@dataclass(frozen=True)
class DeltaMessage:
    """A message, bytes: its units with their forms, and where in it the index and the values of each are."""

    message: Tensor
    units: Sequence[Unit]
    forms: Sequence[Form]
    index: Sequence[Tensor]
    values: Sequence[Tensor]

    def each(self) -> zip[tuple[Unit, Form, Tensor, Tensor]]:
        """(unit, its form, its index, its values)."""
        return zip(self.units, self.forms, self.index, self.values, strict=True)
