"""Groups that teach something."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.sampling.group_judge import differing

GROUPS = torch.tensor([4, 4, 9, 9, 6, 6])
SCORES = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])


def test_by_hand():
    """Groups 4 and 6 have equal scores. Would not catch scores that differ by rounding."""
    assert differing(SCORES, GROUPS).tolist() == [False, False, True, True, False, False]


def test_equal_numbers_are_equal():
    """Three times 0.1, whose standard deviation rounding may leave above 0; and a lone answer. Would not catch a
    tolerance."""
    assert not differing(torch.tensor([0.1, 0.1, 0.1, 0.7]), torch.tensor([3, 3, 3, 5])).any()


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=12))
def test_agrees_with_a_loop(rows):
    """Groups of any sizes. Would not catch rows in another order."""
    groups, scores = torch.tensor([g for g, _ in rows]), torch.tensor([s for _, s in rows])
    seen = {group: {s for g, s in rows if g == group} for group, _ in rows}
    assert differing(scores, groups).tolist() == [len(seen[group]) > 1 for group, _ in rows]
