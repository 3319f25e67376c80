"""Groups that teach something."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.experience.groups import differing, first_groups

GROUPS = torch.tensor([4, 4, 9, 9, 6, 6])
SCORES = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])


def test_by_hand():
    """Groups 4 and 6 have equal scores. Would not catch scores that differ by rounding."""
    assert differing(SCORES, GROUPS).tolist() == [False, False, True, True, False, False]
    assert first_groups(GROUPS, differing(SCORES, GROUPS), 1).tolist() == [2, 3]
    # Filled up in the order of the groups' numbers
    assert first_groups(GROUPS, differing(SCORES, GROUPS), 2).tolist() == [0, 1, 2, 3]
    assert first_groups(GROUPS, differing(SCORES, GROUPS), 9).tolist() == [0, 1, 2, 3, 4, 5]


def test_equal_numbers_are_equal():
    """Three times 0.1, whose standard deviation rounding may leave above 0; and a lone answer. Would not catch a
    tolerance."""
    assert not differing(torch.tensor([0.1, 0.1, 0.1, 0.7]), torch.tensor([3, 3, 3, 5])).any()


@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=12),
    wanted=st.integers(1, 6),
)
def test_agrees_with_a_loop(rows, wanted):
    """Whole groups, those that differ first. Would not catch rows in another order."""
    groups, scores = torch.tensor([g for g, _ in rows]), torch.tensor([s for _, s in rows])
    seen = {group: {s for g, s in rows if g == group} for group, _ in rows}
    differ = differing(scores, groups)
    assert differ.tolist() == [len(seen[group]) > 1 for group, _ in rows]
    order = sorted(seen, key=lambda group: (len(seen[group]) == 1, group))[:wanted]
    assert first_groups(groups, differ, wanted).tolist() == [r for r, (group, _) in enumerate(rows) if group in order]
