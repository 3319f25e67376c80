"""Random ragged batches for tests of losses, as Python lists of floats and as the tensors made of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

REWARDS = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-2, 2, width=32))


@dataclass(frozen=True)
class Batch:
    """rewards, values: one list per answer, which may be empty; groups, greedy, scores: one number per answer.

    scores: what an answer without a token is worth; those of the others have no meaning here. components: two numbers
    per answer. probs, squares, weights: per token its probability, the sum of squares of its distribution's, and an
    importance weight.
    """

    rewards: list[list[float]]
    values: list[list[float]]
    groups: list[int]
    greedy: list[float]
    scores: list[float]
    components: list[tuple[float, float]]
    probs: list[list[float]]
    squares: list[list[float]]
    weights: list[list[float]]

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rewards]

    @property
    def totals(self) -> list[float]:
        return [sum(row) if row else score for row, score in zip(self.rewards, self.scores, strict=True)]

    def others(self, row: int) -> list[int]:
        """The answers of the same group, this one included."""
        return [other for other, group in enumerate(self.groups) if group == self.groups[row]]


def flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


@st.composite
def batches(draw) -> Batch:
    lengths = draw(st.lists(st.integers(0, 5), min_size=2, max_size=8))
    rows = [draw(st.lists(REWARDS, min_size=n, max_size=n)) for n in lengths]
    values = [draw(st.lists(st.floats(-2, 2, width=32), min_size=n, max_size=n)) for n in lengths]
    groups = [draw(st.sampled_from([3, 7, 8])) for _ in lengths]
    greedy, scores = ([draw(REWARDS) for _ in lengths] for _ in range(2))
    components = [(draw(REWARDS), draw(REWARDS)) for _ in lengths]
    probs = [draw(st.lists(st.sampled_from([0.1, 0.5, 0.75]), min_size=n, max_size=n)) for n in lengths]
    # At least the square of the token's own probability, which leaves room for others'
    squares = [[p * p + draw(st.sampled_from([0.01, 0.04])) for p in row] for row in probs]
    weights = [draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=n, max_size=n)) for n in lengths]
    return Batch(rows, values, groups, greedy, scores, components, probs, squares, weights)
