"""What a rank passes on to its node must have arrived: schedules run with messages that take as long as they like."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import numbered_model, plan_for
from random_layouts import cases
from simulated_ranks import execute, is_right, schedules_of, view

from megatron_rl.hybrid_engine.layout import FOREIGN
from megatron_rl.model.families import ModelShape
from megatron_rl.parallel.rank_grid import RolloutGrid, TrainGrid
from megatron_rl.parallel.stages import StagePlan

SLOW_MESSAGES = {
    "case": cases(),
    "nodes": st.lists(st.integers(0, 3), min_size=1, max_size=16),
    "message_numel": st.sampled_from([7, 64, 1 << 20]),
    "direct_numel": st.sampled_from([2, 20, 1 << 20]),
    "seed": st.integers(0, 1 << 16),
    "laziness": st.sampled_from([0.3, 0.9, 1.0]),
}


def is_right_when_late(case, nodes, message_numel, direct_numel, seed, laziness) -> bool:
    shape, architecture, rollout, stages, options = case
    plan, tensors = plan_for(shape, architecture, rollout, stages, **options | {"nodes": nodes})
    model = numbered_model(tensors)
    schedules = schedules_of(plan, message_numel, direct_numel)
    return is_right(plan, execute(plan, schedules, model, random.Random(seed), laziness), model)


@settings(max_examples=10, deadline=None)
@given(**SLOW_MESSAGES)
def test_no_rank_passes_on_what_has_not_come(**drawn) -> None:
    """Whatever nodes ranks sit on and however long messages take: right elements, and no rank waits for ever.

    Would not catch an executor that does not keep to `Step.after`.
    """
    assert is_right_when_late(**drawn)


@pytest.mark.exhaustive
@settings(max_examples=200, deadline=None)
@given(**SLOW_MESSAGES)
def test_no_rank_passes_on_what_has_not_come_in_many_layouts(**drawn) -> None:
    """The same, ten times as often."""
    assert is_right_when_late(**drawn)


@settings(max_examples=12, deadline=None)
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
