"""Schedules run by ranks that exist only here, with messages that take as long as they like."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field
from unittest import mock

import torch
from layouts import expected_foreign, training_buffers

from megatron_rl.hybrid_engine import schedule
from megatron_rl.hybrid_engine.layout import FOREIGN
from megatron_rl.hybrid_engine.schedule import Leg, Step, local_copies, make_schedule, most_packed

UNDEFINED = -1
"""What a receiver's memory holds while a message is under way."""


def view(buffers, region):
    return buffers[region.buffer].as_strided(region.shape, region.stride, region.offset)


def read(buffers, leg: Leg) -> torch.Tensor:
    return torch.cat([view(buffers, region).flatten() for region in leg.regions])


def write(buffers, leg: Leg, message: torch.Tensor) -> None:
    for region, part in zip(leg.regions, message.split([r.numel for r in leg.regions]), strict=True):
        view(buffers, region).copy_(part.view(region.shape))


@dataclass(eq=False)
class Message:
    """One leg of a step that has begun; `data`: scratch memory, unless the message lies in the buffers."""

    leg: Leg
    buffers: dict[int, torch.Tensor]
    data: torch.Tensor | None
    is_over: bool = False


Queues = defaultdict[tuple[int, int], deque[Message]]
"""(sender, receiver) -> what one of the two has begun and the other has not; between two ranks messages keep order."""


@dataclass
class Rank:
    """One member on its way through its steps, as the executor takes them: at most two have begun and not finished."""

    number: int
    steps: list[Step]
    buffers: dict[int, torch.Tensor]
    under_way: deque[list[Message]] = field(default_factory=deque)
    num_begun: int = 0

    @property
    def is_done(self) -> bool:
        return self.num_begun == len(self.steps) and not self.under_way

    def advance(self, sent: Queues, awaited: Queues) -> bool:
        """Begin or finish one step, if that is possible now."""
        if self.num_begun < len(self.steps):
            step, num_finished = self.steps[self.num_begun], self.num_begun - len(self.under_way)
            if num_finished >= max(step.after, self.num_begun - 1):
                self.begin(step, sent, awaited)
                return True
        if not self.under_way or not all(message.is_over for message in self.under_way[0]):
            return False
        for message in self.under_way.popleft()[1:]:
            if message.data is not None:
                write(self.buffers, message.leg, message.data)
        return True

    def begin(self, step: Step, sent: Queues, awaited: Queues) -> None:
        out = Message(step.send, self.buffers, None, is_over=step.send is None)
        into = Message(step.receive, self.buffers, None, is_over=step.receive is None)
        if step.send is not None:
            out.data = None if step.send.is_direct else read(self.buffers, step.send)
            sent[self.number, step.send.peer].append(out)
        if step.receive is not None:
            undefined = torch.full((step.receive.numel,), UNDEFINED)
            if step.receive.is_direct:
                write(self.buffers, step.receive, undefined)
            else:
                into.data = undefined
            awaited[step.receive.peer, self.number].append(into)
        self.under_way.append([out, into])
        self.num_begun += 1


def deliver(out: Message, into: Message) -> None:
    message = out.data if out.data is not None else read(out.buffers, out.leg)
    assert message.numel() == into.leg.numel
    if into.data is None:
        write(into.buffers, into.leg, message)
    else:
        into.data = message
    out.is_over = into.is_over = True


def execute(plan, schedules, model, chance: random.Random, laziness: float) -> list[dict[int, torch.Tensor]]:
    """Run all schedules in an order drawn by `chance`; `laziness`: how likely it is that messages wait for ranks."""
    ranks = []
    for number, (member, mine, steps) in enumerate(zip(plan.members, plan.plans, schedules, strict=True)):
        buffers = training_buffers(member, model) | {FOREIGN: torch.zeros(mine.foreign_numel, dtype=torch.int64)}
        ranks.append(Rank(number, steps, buffers))
    sent, awaited = defaultdict(deque), defaultdict(deque)
    while not all(rank.is_done for rank in ranks):
        moved = sum(rank.advance(sent, awaited) for rank in chance.sample(ranks, len(ranks))) > 0
        ready = [pair for pair in sent if sent[pair] and awaited[pair]]
        for pair in chance.sample(ready, len(ready)):
            if not moved or chance.random() > laziness:
                deliver(sent[pair].popleft(), awaited[pair].popleft())
                moved = True
        assert moved, "the schedules block one another"
    for i, rank in enumerate(ranks):
        for source, dest in local_copies(plan, i):
            view(rank.buffers, dest).copy_(view(rank.buffers, source))
    return [rank.buffers for rank in ranks]


def schedules_of(plan, message_numel: int, direct_numel: int) -> list[list[Step]]:
    with mock.patch.object(schedule, "DIRECT_NUMEL", direct_numel):
        return [make_schedule(plan, number, message_numel) for number in range(len(plan.members))]


def packed_counts(plan, schedules, message_numel: int, direct_numel: int) -> list[tuple[int, int]]:
    """(longest packed message as it is counted, as it is in the schedule) of each rank."""
    with mock.patch.object(schedule, "DIRECT_NUMEL", direct_numel):
        counted = [most_packed(plan, number, message_numel) for number in range(len(plan.members))]
    legs = [[leg for step in steps for leg in (step.send, step.receive) if leg] for steps in schedules]
    return [
        (most, max((leg.numel for leg in own if not leg.is_direct), default=0))
        for most, own in zip(counted, legs, strict=True)
    ]


def is_right(plan, buffers, model) -> bool:
    return all(torch.equal(found[FOREIGN], expected_foreign(plan, i, model)) for i, found in enumerate(buffers))
