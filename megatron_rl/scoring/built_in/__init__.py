"""Rule rewards that need no file of the user's; every module declares one.

A rule returns a dict: "score" and "acc" 1.0 or 0.0, and "pred", the answer as it was understood, for majority votes.
"""

from typing import Any

Score = dict[str, float | str]
Extra = dict[str, Any] | None


def score_of(right: bool, answer: str) -> Score:
    """Return the dict of a rule that is either met or not."""
    return {"score": float(right), "acc": float(right), "pred": answer}
