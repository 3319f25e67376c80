"""Exchanges and weight transfers as NCCL would run them: a rank's calls one after the other, messages of a pair first
in, first out. Plans are matched by the simulation of rehearsals; no processes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import plan_for
from random_layouts import cases
from simulated_ranks import packed_counts, schedules_of
from test_transfer_plan import plan_of, pools

from megatron_rl.model.families import ModelShape
from megatron_rl.parallel.rank_grid import RolloutGrid, TrainGrid
from megatron_rl.parallel.stages import StagePlan
from megatron_rl.rehearse.group_calls import RECEIVE, SEND, GroupCall, Size
from megatron_rl.rehearse.matcher import match_calls

SIZES = {"message_numel": st.sampled_from([7, 64, 1 << 20]), "direct_numel": st.sampled_from([2, 20, 1 << 20])}


def calls_of(schedules):
    """Every step of every rank as the messages that it posts at once."""
    group = tuple(range(len(schedules)))

    def call(name, leg, number):
        return GroupCall(
            "reshard", name, group, (Size(leg.numel, "int64", "cuda"),), f"step {number}", None, leg.peer, number
        )

    return {
        rank: [
            call(name, leg, number)
            for number, step in enumerate(steps)
            for name, leg in ((SEND, step.send), (RECEIVE, step.receive))
            if leg is not None
        ]
        for rank, steps in enumerate(schedules)
    }


def fits_and_counts(plan, message_numel, direct_numel) -> None:
    """The messages fit, and the longest that is packed is as long as counted without making the messages."""
    schedules = schedules_of(plan, message_numel, direct_numel)
    match = match_calls(calls_of(schedules))
    assert match.fits, match.sentences()
    assert all(counted == made for counted, made in packed_counts(plan, schedules, message_numel, direct_numel))


@settings(max_examples=30, deadline=None)
@given(case=cases(), **SIZES)
def test_exchanges_end(case, message_numel, direct_numel):
    """Random models and layouts. Would not catch collectives of another group between the messages."""
    *arguments, options = case
    plan, _ = plan_for(*arguments, **options)
    fits_and_counts(plan, message_numel, direct_numel)


@settings(max_examples=10, deadline=None)
@given(pools=pools(), **SIZES)
def test_transfers_end(pools, message_numel, direct_numel):
    """Random pools, with replicas that pass weights on. Would not catch a receiver that is lost."""
    arguments, options = pools
    plan, *_ = plan_of(*arguments, **options)
    fits_and_counts(plan, message_numel, direct_numel)


@pytest.mark.exhaustive
@pytest.mark.weekly
@settings(max_examples=300, deadline=None)
@given(case=cases(), pools=pools(), **SIZES)
def test_many_more(case, pools, message_numel, direct_numel):
    """The same, for longer."""
    *layouts, options = case
    arguments, transferred = pools
    for plan, *_ in (plan_for(*layouts, **options), plan_of(*arguments, **transferred)):
        fits_and_counts(plan, message_numel, direct_numel)


@pytest.fixture
def three_stages():
    """PP3: every rank sends its stage to two others, in rounds."""
    shape = ModelShape(3, 8, 4, 4, 2, 8, 64, tied=False)
    plan, _ = plan_for(shape, "LlamaForCausalLM", RolloutGrid(TrainGrid(3, 1, 3), 1), StagePlan(3, 3))
    return schedules_of(plan, 1 << 20, 1 << 20)


def test_a_rank_that_takes_rounds_in_another_order_hangs(three_stages):
    """Rank 0 begins with the last round: who waits for whom is named. Would not catch equal rounds of all ranks."""
    assert match_calls(calls_of(three_stages)).fits
    three_stages[0] = three_stages[0][::-1]
    match = match_calls(calls_of(three_stages))
    assert not match.fits and {one.at.rank for one in match.cycle()} <= {0, 1, 2} and match.cycle()
    assert "wait for each other" in match.sentences()[0]


def test_sends_and_receives_one_after_the_other_hang(three_stages):
    """Without one coalesced call all ranks send first. Would not catch a backend that buffers messages."""
    alone = {rank: [replace(call, batch=None) for call in calls] for rank, calls in calls_of(three_stages).items()}
    assert not match_calls(alone).fits
