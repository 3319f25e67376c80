"""Changes of a piece, from one buffer to another: every bit, every form, any layout at both ends."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.hybrid_engine.delta_plan import Unit, grouped
from megatron_rl.hybrid_engine.delta_sizes import Form, Payload, mask_bytes, payload_of
from megatron_rl.hybrid_engine.deltas import (
    as_bits,
    elements_at,
    index_of,
    packed_bits,
    read_values,
    unpacked_bits,
    view_of,
    write_values,
)
from megatron_rl.hybrid_engine.layout import Region

DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}


@st.composite
def strided(draw, shape):
    """A region of this shape with gaps, in an order of the dims of its own, and the elements of a buffer for it."""
    stride, step = {}, 1
    for dim in draw(st.permutations(range(len(shape)))):
        stride[dim] = step + draw(st.integers(0, 3))
        step = stride[dim] * shape[dim]
    offset = draw(st.integers(0, 5))
    return Region(0, offset, tuple(shape), tuple(stride[dim] for dim in range(len(shape)))), offset + step


@st.composite
def cases(draw):
    """(itemsize, two regions of one piece, sizes of their buffers, share of changed elements, seed)."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    share = draw(st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.97, 1.0]))
    return draw(st.sampled_from([1, 2, 4])), draw(strided(shape)), draw(strided(shape)), share, draw(st.integers(0, 99))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_what_changed_arrives_bit_for_bit_in_every_form(case) -> None:
    """Random bits as elements, NaN of any payload and both zeros among them; elements beside the piece stay. Would not
    catch a form that is never the smallest.
    """
    itemsize, (source, source_size), (dest, dest_size), share, seed = case
    generator = torch.Generator().manual_seed(seed)

    def bits(size: int) -> torch.Tensor:
        return torch.randint(0, 256, (size * itemsize,), dtype=torch.uint8, generator=generator).view(DTYPES[itemsize])

    before, there = as_bits(bits(source_size)), as_bits(bits(dest_size))
    view_of(there, dest).copy_(view_of(before, source))
    now, beside = before.clone(), there.clone()
    changed = torch.rand(source.shape, generator=generator) < share
    view_of(now, source)[changed] ^= 1 + torch.randint(0, 100, (int(changed.sum()),), generator=generator).to(now.dtype)
    for form in Form:
        received, index = there.clone(), index_of(changed.flatten(), form)
        values = read_values(now, source, form, index)
        payload = forced(form, int(changed.sum()), source.numel, itemsize)
        assert (index.nbytes, values.nbytes) == (payload.index_bytes, payload.value_bytes)
        write_values(received, dest, form, index, values)
        assert torch.equal(view_of(received, dest), view_of(now, source))
        view_of(received, dest).zero_()
        view_of(beside, dest).zero_()
        assert torch.equal(received, beside)


def forced(form: Form, changed: int, numel: int, itemsize: int) -> Payload:
    index = {Form.POSITIONS: 4 * changed, Form.MASK: (numel + 7) // 8, Form.WHOLE: 0}[form]
    number = numel if form is Form.WHOLE else changed
    return Payload(form, index, number, number * itemsize)


def test_a_nan_is_itself_and_two_zeros_differ() -> None:
    """By hand. Would not catch a dtype whose integers are not compared."""
    before = torch.tensor([0.0, float("nan"), 1.0, -0.0], dtype=torch.bfloat16)
    now = torch.tensor([-0.0, float("nan"), 1.0, -0.0], dtype=torch.bfloat16)
    assert (as_bits(now) != as_bits(before)).tolist() == [True, False, False, False]
    as_bits(now)[1] += 1
    assert torch.isnan(now[1]) and (as_bits(now) != as_bits(before)).tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("changed", "form", "num_bytes"),
    [
        (0, Form.POSITIONS, 0),
        (1, Form.POSITIONS, 6),
        (31, Form.POSITIONS, 186),
        (32, Form.POSITIONS, 192),
        (33, Form.MASK, 194),
        (960, Form.MASK, 2048),
        (961, Form.WHOLE, 2048),
        (1024, Form.WHOLE, 2048),
    ],
)
def test_the_smallest_form_by_hand(changed, form, num_bytes) -> None:
    """1024 elements of bfloat16: positions cost 4 bytes each, a mask 128."""
    payload = payload_of(changed, 1024, 2)
    assert (payload.form, payload.num_bytes) == (form, num_bytes)


@given(st.integers(1, 5000), st.floats(0, 1), st.sampled_from([1, 2, 4]))
def test_no_form_is_smaller_and_an_index_has_a_bit_for_an_element_at_most(numel, share, itemsize) -> None:
    """Would not catch an index that cannot be read back; the first test does."""
    changed = int(share * numel)
    payload = payload_of(changed, numel, itemsize)
    assert payload.num_bytes == min(forced(form, changed, numel, itemsize).num_bytes for form in Form)
    assert payload.index_bytes <= mask_bytes(numel) and payload.num_bytes <= numel * itemsize


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_masks_are_eight_flags_a_byte(flags) -> None:
    """Bit by bit, and back. Would not catch a machine of the other byte order, which torch does not run on."""
    packed, groups = packed_bits(torch.tensor(flags)), [flags[first : first + 8] for first in range(0, len(flags), 8)]
    assert packed.tolist() == [sum(flag << bit for bit, flag in enumerate(group)) for group in groups]
    assert unpacked_bits(packed, len(flags)).tolist() == flags


@given(st.data())
def test_positions_are_found_in_any_region(data) -> None:
    """Against the places of a view of all numbers."""
    region, size = data.draw(strided(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))))
    places = view_of(torch.arange(size), region).flatten()
    assert torch.equal(elements_at(region, torch.arange(region.numel, dtype=torch.int32)), places)


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(20, 50))
def test_messages_have_every_change_once_in_order_and_are_not_too_long(sizes, most) -> None:
    """Would not catch messages that are shorter than they could be by more than a unit."""
    units = [Unit((0, number), Region(0, 0, (1,), (1,))) for number in range(len(sizes))]
    messages = list(grouped(units, lambda unit: sizes[unit.key[1]], most))
    assert [unit for message in messages for unit in message] == [unit for unit in units if sizes[unit.key[1]]]
    totals = [sum(sizes[unit.key[1]] for unit in message) for message in messages]
    assert all(0 < total <= most for total in totals)
    assert all(sum(pair) > most - 20 for pair in zip(totals, totals[1:], strict=False))
