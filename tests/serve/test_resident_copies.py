"""Copies in slots: which leaves, and which samples are drawn together."""

from __future__ import annotations

from megatron_rl.serve.resident_copies import ResidentCopies, batches


def slot_of(resident: ResidentCopies, copy: str) -> tuple[int, bool]:
    """(slot, whether the copy was there)."""
    if (slot := resident.use(copy)) is not None:
        return slot, True
    resident.note(copy, room := resident.make_room())
    return room, False


def test_the_least_recently_used_copy_leaves() -> None:
    """By hand. Would not catch a copy that leaves although the same batch reads it, which `batches` prevents."""
    resident = ResidentCopies(2)
    asked = ["a", "b", "a", "c", "a", "b", "c"]
    assert [slot_of(resident, copy) for copy in asked] == [
        *((0, False), (1, False), (0, True)),
        *((1, False), (0, True), (1, False), (0, False)),
    ]
    resident.forget("c")
    assert slot_of(resident, "d") == (0, False) and slot_of(resident, "b") == (1, True)


def test_batches_have_no_more_copies_than_slots() -> None:
    """Every place once. Would not catch batches that could be fewer."""
    copies = ["a", "b", "a", "c", "b", "d", "e"]
    assert list(batches(copies, 2)) == [[0, 1, 2, 4], [3, 5], [6]]
    assert list(batches(copies, 1)) == [[0, 2], [1, 4], [3], [5], [6]] and list(batches(copies, 5)) == [[*range(7)]]
