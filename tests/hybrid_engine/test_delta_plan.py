"""Which changes travel between ranks in random weight transfers, and that they turn old weights into new ones."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import expected_foreign, numbered_model, training_buffers
from test_transfer_plan import plan_of, pools

from megatron_rl.hybrid_engine.delta_plan import make_delta_plan
from megatron_rl.hybrid_engine.delta_sizes import payload_of
from megatron_rl.hybrid_engine.deltas import index_of, read_values, view_of, write_values
from megatron_rl.hybrid_engine.layout import FOREIGN

CASES = {
    "pools": pools(),
    "unit_numel": st.sampled_from([5, 64, 1 << 20]),
    "share": st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    "seed": st.integers(0, 1 << 16),
}


def check_deltas(pools, unit_numel: int, share: float, seed: int) -> None:
    """Owners find what changed; every rank sends what it owns or was sent before, and reads it from its own memory."""
    arguments, options = pools
    plan, tensors, num_senders = plan_of(*arguments, **options)
    plans = [make_delta_plan(plan, number, unit_numel) for number in range(len(plan.members))]
    generator, old = torch.Generator().manual_seed(seed), numbered_model(tensors)
    new = {
        key: torch.where(torch.rand(weights.shape, generator=generator) < share, -weights, weights)
        for key, weights in old.items()
    }
    buffers = [training_buffers(member, new) for member in plan.members[:num_senders]]
    buffers += [{FOREIGN: expected_foreign(plan, number, old)} for number in range(num_senders, len(plan.members))]
    before = [training_buffers(member, old) for member in plan.members[:num_senders]]
    known: list[dict] = [{} for _ in plan.members]
    for number in range(num_senders):
        assert plans[number].numels == plans[0].numels
        assert [unit.numel for unit in plans[number].owned] == list(plans[0].numels[number])
        for unit in plans[number].owned:
            region = unit.region
            changed = view_of(buffers[number][region.buffer], region) != view_of(before[number][region.buffer], region)
            count = int(changed.sum())
            form = payload_of(count, unit.numel, 8).form
            known[number][unit.key] = count, form, index_of(changed.flatten(), form)
    assert sum(map(sum, plans[0].numels)) == sum(tensor.numel for tensor in tensors.values())
    for phase in range(3):
        sent, received = defaultdict(list), defaultdict(list)
        for number, mine in enumerate(plans):
            for turn in mine.turns:
                if turn.phase == phase and turn.sent:
                    sent[number, turn.dest] += turn.sent
                if turn.phase == phase and turn.received:
                    received[turn.source, number] += turn.received
        assert sent.keys() == received.keys()
        for (source, dest), units in sent.items():
            others = received[source, dest]
            assert [(unit.key, unit.numel) for unit in units] == [(unit.key, unit.numel) for unit in others]
            assert all(unit.numel <= unit_numel for unit in units)
            for out, into in zip(units, others, strict=True):
                count, form, index = known[source][out.key]
                values = read_values(buffers[source][out.region.buffer], out.region, form, index)
                write_values(buffers[dest][FOREIGN], into.region, form, index, values)
                known[dest][into.key] = count, form, index
    for number in range(num_senders, len(plan.members)):
        assert torch.equal(buffers[number][FOREIGN], expected_foreign(plan, number, new))


@settings(max_examples=10, deadline=None)
@given(**CASES)
def test_old_weights_and_changes_make_the_new_weights_on_every_rank(**arguments) -> None:
    """Random pools on random nodes. Both ends of every pair name the same units in one order, and what is passed on
    came in an earlier phase. Would not catch steps that begin too early, nor messages cut otherwise at both ends.
    """
    check_deltas(**arguments)


@pytest.mark.exhaustive
@pytest.mark.weekly
@settings(max_examples=300, deadline=None)
@given(**CASES)
def test_many_more_deltas(**arguments) -> None:
    """Random pools as above, thirty times as many."""
    check_deltas(**arguments)
