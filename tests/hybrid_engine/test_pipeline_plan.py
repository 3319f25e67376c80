"""The exchange that gives every pipeline stage the whole model, simulated on plain buffers."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.hybrid_engine.plan import ALIGNMENT, Slot, StageLayout, Transfer, make_plan, numel_lacking

NOT_A_WEIGHT = -1


def layout(*slots):
    return StageLayout(tuple(Slot(name, offset, shape) for name, offset, shape in slots))


@st.composite
def stage_layouts(draw):
    """1 to 4 stages, some empty; tensors on one or more of them, in any order, with and without gaps between."""
    num_stages = draw(st.integers(1, 4))
    held: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(num_stages)]
    for number in range(draw(st.integers(0, 9))):
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=2)))
        for stage in draw(st.sets(st.integers(0, num_stages - 1), min_size=1)):
            held[stage].append((f"tensor{number}", shape))
    layouts = []
    for tensors in held:
        slots, offset = [], 0
        for name, shape in draw(st.permutations(tensors)):
            offset += draw(st.sampled_from([0, 0, 3, 64]))
            slots.append(Slot(name, offset, shape))
            offset = slots[-1].stop
        layouts.append(StageLayout(tuple(slots)))
    return layouts


def truth(layouts):
    """A distinct number for every element of every logical tensor."""
    values, start = {}, 1
    for slot in (slot for stage in layouts for slot in stage.slots):
        if slot.name not in values:
            values[slot.name] = torch.arange(start, start + slot.numel)
            start += slot.numel
    return values


def own_buffers(layouts, values):
    buffers = []
    for stage in layouts:
        buffer = torch.full((max((slot.stop for slot in stage.slots), default=0),), NOT_A_WEIGHT)
        for slot in stage.slots:
            buffer[slot.offset : slot.stop] = values[slot.name]
        buffers.append(buffer)
    return buffers


def execute(plan, own):
    """Every stage's receive buffer after the transfers, and how often each of its elements was written."""
    foreign = [torch.full((numel,), NOT_A_WEIGHT) for numel in plan.foreign_numel]
    writes = [torch.zeros(numel, dtype=torch.int64) for numel in plan.foreign_numel]
    for transfer in plan.transfers:
        for stage, offset in transfer.landing:
            assert offset == transfer.offset_at(stage)
            assert offset + transfer.numel <= plan.foreign_numel[stage]
            foreign[stage][offset : offset + transfer.numel] = own[transfer.source][transfer.start : transfer.stop]
            writes[stage][offset : offset + transfer.numel] += 1
    return foreign, writes


def test_two_stages_by_hand():
    """Two runs around a gap, a bucket of 5, landings at 64. Would not catch a tensor held twice."""
    plan = make_plan([layout(("a", 0, (2, 3)), ("b", 6, (2,)), ("c", 10, (4,))), layout(("d", 0, (3,)))], 5)
    assert plan.transfers == (
        Transfer(source=0, start=0, stop=5, landing=((1, 0),)),
        Transfer(source=0, start=5, stop=8, landing=((1, 5),)),
        Transfer(source=0, start=10, stop=14, landing=((1, 64),)),
        Transfer(source=1, start=0, stop=3, landing=((0, 0),)),
    )
    assert plan.foreign == ((Slot("d", 0, (3,)),), (Slot("a", 0, (2, 3)), Slot("b", 6, (2,)), Slot("c", 64, (4,))))
    assert plan.foreign_numel == (64, 128)
    assert (plan.numel_received(0), plan.numel_received(1)) == (3, 12)


def test_tied_embedding_on_first_and_last_of_two():
    """Both hold it, so it does not travel. Would not catch copies that differ in value."""
    plan = make_plan([layout(("tied", 0, (4,)), ("x", 4, (2,))), layout(("y", 0, (3,)), ("tied", 3, (4,)))], 100)
    assert plan.transfers == (Transfer(0, 4, 6, ((1, 0),)), Transfer(1, 0, 3, ((0, 0),)))
    assert plan.foreign == ((Slot("y", 0, (3,)),), (Slot("x", 0, (2,)),))


def test_tied_embedding_on_first_and_last_of_three():
    """It goes to the middle stage only, once, from the first. Would not catch a bad bucket cut."""
    plan = make_plan(
        [
            layout(("tied", 0, (4,)), ("x", 4, (2,))),
            layout(("m", 0, (5,))),
            layout(("y", 0, (3,)), ("tied", 3, (4,))),
        ],
        100,
    )
    assert plan.transfers == (
        Transfer(0, 0, 4, ((1, 0),)),
        Transfer(0, 4, 6, ((1, 64), (2, 0))),
        Transfer(1, 0, 5, ((0, 0), (2, 64))),
        Transfer(2, 0, 3, ((0, 64), (1, 128))),
    )
    assert [plan.numel_received(stage) for stage in range(3)] == [8, 9, 7]
    assert [slot.name for slot in plan.foreign[1]] == ["tied", "x", "y"]


def test_one_stage_needs_nothing():
    """No pipeline, no exchange. Would not catch anything about two stages."""
    plan = make_plan([layout(("a", 0, (2,)))], 8)
    assert (plan.transfers, plan.foreign, plan.foreign_numel) == ((), ((),), (0,))


@settings(max_examples=150, deadline=None)
@given(layouts=stage_layouts(), bucket=st.integers(1, 40))
def test_every_lacking_element_arrives_exactly_once(layouts, bucket):
    """Values, uniqueness, lower bound, bucket size, alignment. Would not catch a deadlock in the exchange."""
    plan, values = make_plan(layouts, bucket), truth(layouts)
    own = own_buffers(layouts, values)
    foreign, writes = execute(plan, own)
    for stage, stage_layout in enumerate(layouts):
        held = {slot.name for slot in stage_layout.slots}
        assert sorted(slot.name for slot in plan.foreign[stage]) == sorted(values.keys() - held)
        claimed = torch.zeros(plan.foreign_numel[stage], dtype=torch.int64)
        for slot in plan.foreign[stage]:
            assert torch.equal(foreign[stage][slot.offset : slot.stop], values[slot.name])
            claimed[slot.offset : slot.stop] += 1
        assert torch.equal(writes[stage], claimed) and set(claimed.tolist()) <= {0, 1}
        assert plan.numel_received(stage) == numel_lacking(layouts, stage)
        assert numel_lacking(layouts, stage) == sum(values[name].numel() for name in values.keys() - held)
    assert all(0 < transfer.numel <= bucket for transfer in plan.transfers)
    assert all(transfer.source not in transfer.receivers for transfer in plan.transfers)
    assert all(numel % ALIGNMENT == 0 for numel in plan.foreign_numel)
