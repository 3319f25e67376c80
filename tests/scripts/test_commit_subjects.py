"""The commit-msg hook: what it lets through, and what it says."""

from __future__ import annotations

import pytest
from check_commit_subject import problems

BODY = "\n\nBecause of this: 3 before, 2 after.\n"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("losses: merge rows of equal groups once" + BODY, None),
        ("docs: feed tables from one script\n# Please enter" + BODY, None),
        ("Merge branch 'x'", None),
        ("losses: merge rows of equal groups once", "no body"),
        ("losses: merged rows" + BODY, "'merged' is no imperative"),
        ("Slices begin when weights begin to arrive" + BODY, "not `area: imperative`"),
        ("losses: merge rows." + BODY, "full stop"),
        ("nowhere: merge rows" + BODY, "area nowhere is none of"),
        ("losses: merge " + "rows " * 14 + "once" + BODY, "at most 72"),
        ("losses: merge rows\nonce\n\nWhy." + BODY, "second line"),
        ("", "not `area: imperative`"),
    ],
)
def test_what_the_hook_says(message: str, said: str | None) -> None:
    """By hand, one rule at a time. Would not catch a noun in the place of the verb."""
    found = problems(message)
    assert (found == []) if said is None else any(said in sentence for sentence in found), found
