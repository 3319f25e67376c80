"""What a rank passes on to its node must have arrived: schedules run with messages that take as long as they like."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import expected_foreign, numbered_model, plan_for, training_buffers
from random_layouts import cases

from megatron_rl.hybrid_engine import schedule
from megatron_rl.hybrid_engine.layout import FOREIGN
from megatron_rl.hybrid_engine.schedule import Leg, Step, local_copies, make_schedule
from megatron_rl.model.families import ModelShape
from megatron_rl.parallel.rank_grid import RolloutGrid, TrainGrid
from megatron_rl.parallel.stages import StagePlan

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


def is_right(plan, buffers, model) -> bool:
    return all(torch.equal(found[FOREIGN], expected_foreign(plan, i, model)) for i, found in enumerate(buffers))


@settings(max_examples=60, deadline=None)
@given(
    case=cases(),
    nodes=st.lists(st.integers(0, 3), min_size=1, max_size=16),
    message_numel=st.sampled_from([7, 64, 1 << 20]),
    direct_numel=st.sampled_from([2, 20, 1 << 20]),
    seed=st.integers(0, 1 << 16),
    laziness=st.sampled_from([0.3, 0.9, 1.0]),
)
def test_no_rank_passes_on_what_has_not_come(case, nodes, message_numel, direct_numel, seed, laziness) -> None:
    """Whatever nodes ranks sit on and however long messages take: right elements, and no rank waits for ever.

    Would not catch an executor that does not keep to `Step.after`.
    """
    shape, architecture, rollout, stages, options = case
    plan, tensors = plan_for(shape, architecture, rollout, stages, **options | {"nodes": nodes})
    model = numbered_model(tensors)
    schedules = schedules_of(plan, message_numel, direct_numel)
    assert is_right(plan, execute(plan, schedules, model, random.Random(seed), laziness), model)


@settings(max_examples=40, deadline=None)
@given(
    case=cases(),
    nodes=st.lists(st.integers(0, 3), min_size=1, max_size=16),
    message_numel=st.sampled_from([7, 64, 1 << 20]),
    direct_numel=st.sampled_from([2, 20, 1 << 20]),
)
def test_a_step_waits_only_for_what_it_passes_on(case, nodes, message_numel, direct_numel) -> None:
    """`after` is one more than the last earlier step that writes an element which the message reads, or 0."""
    shape, architecture, rollout, stages, options = case
    plan, _ = plan_for(shape, architecture, rollout, stages, **options | {"nodes": nodes})
    for mine, steps in zip(plan.plans, schedules_of(plan, message_numel, direct_numel), strict=True):
        places = {FOREIGN: torch.arange(mine.foreign_numel)}
        written_by = torch.full((mine.foreign_numel,), -1)
        for number, step in enumerate(steps):
            regions = [region for region in step.send.regions if region.buffer == FOREIGN] if step.send else []
            last = max((int(written_by[view(places, region)].max()) for region in regions), default=-1)
            assert step.after == last + 1
            for region in step.receive.regions if step.receive else ():
                written_by[view(places, region)] = number


def test_without_the_wait_old_bytes_are_passed_on() -> None:
    """TP2 PP2 -> TP2 with a node for each stage: norms come from the other node, for both ranks, through one."""
    shape = ModelShape(2, 8, 2, 2, 2, 8, 64, tied=False)
    rollout = RolloutGrid(TrainGrid(4, 2, 2), 2)
    plan, tensors = plan_for(shape, "LlamaForCausalLM", rollout, StagePlan(2, 2), per_node=2)
    model, schedules = numbered_model(tensors), schedules_of(plan, 1 << 20, 1 << 20)
    assert is_right(plan, execute(plan, schedules, model, random.Random(0), 1.0), model)
    hasty = [[replace(step, after=0) for step in steps] for steps in schedules]
    assert not is_right(plan, execute(plan, hasty, model, random.Random(0), 1.0), model)
