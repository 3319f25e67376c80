"""From tokens to one loss: five modes, the same however the mini-batch is cut up."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schema import LOSS_AGG_MODES
from megatron_rl.losses.aggregate import BatchTotals, counted, token_weights

# Rows 1, 2 | 3 (its second token left out) | nothing
LENGTHS, KEPT = torch.tensor([2, 2, 0]), torch.tensor([1.0, 1.0, 1.0, 0.0])
LOSSES = torch.tensor([1.0, 2.0, 3.0, 100.0])
BY_HAND = {
    "token-mean": 6 / 3,
    "token-sum": 6,
    "seq-mean-token-sum": (3 + 3) / 2,
    "seq-mean-token-mean": (1.5 + 3) / 2,
    "seq-mean-token-sum-norm": (3 + 3) / 2 / 10,
}


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_by_hand(mode):
    """A token and a row that do not count. Would not catch totals of one rank only."""
    totals = BatchTotals(*counted(KEPT, LENGTHS).tolist())
    assert totals == BatchTotals(tokens=3, rows=2)
    weights = token_weights(KEPT, LENGTHS, totals, mode, scale=10)
    assert float((weights * LOSSES).sum()) == pytest.approx(BY_HAND[mode])
    assert weights[3] == 0


def test_what_is_left_out_is_no_denominator():
    """Two tokens, one of them rejected: its neighbour's loss of 3 counts 3; half of it where all tokens were counted.

    Would not catch `bypass_mode`, whose totals are known before.
    """
    kept, lengths = torch.tensor([1.0, 0.0]), torch.tensor([2])
    totals = BatchTotals(*counted(kept, lengths).tolist())
    weights = token_weights(kept, lengths, totals, "token-mean", 8)
    assert float((weights * torch.tensor([3.0, 7.0])).sum()) == 3.0


def test_nothing_counts():
    """Weights are 0 and finite where every token is left out. Would not catch a step taken for nothing."""
    for mode in LOSS_AGG_MODES:
        assert token_weights(torch.zeros(2), torch.tensor([2]), BatchTotals(0, 0), mode, 8).tolist() == [0.0, 0.0]


def test_an_unknown_mode_is_refused():
    """Would not catch one that preflight lets pass."""
    with pytest.raises(ValueError, match="row-mean is no way"):
        token_weights(KEPT, LENGTHS, BatchTotals(3, 2), "row-mean", 8)


LOOPS = {
    "token-mean": lambda rows: statistics.fmean(x for row in rows for x in row),
    "token-sum": lambda rows: sum(x for row in rows for x in row),
    "seq-mean-token-sum": lambda rows: statistics.fmean(sum(row) for row in rows),
    "seq-mean-token-mean": lambda rows: statistics.fmean(statistics.fmean(row) for row in rows),
    "seq-mean-token-sum-norm": lambda rows: statistics.fmean(sum(row) / 7 for row in rows),
}
row_lists = st.lists(st.lists(st.tuples(st.floats(-3, 3), st.booleans()), max_size=5), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(rows=row_lists, pieces=st.integers(1, 6))
def test_agrees_with_a_loop_however_it_is_cut(rows, pieces):
    """Row by row into any number of pieces. Would not catch a row that is cut in two."""
    counting = [[x for x, kept in row if kept] for row in rows]
    counting = [row for row in counting if row]
    chunks = [rows[start::pieces] for start in range(pieces)]
    tensors = []
    for chunk in chunks:
        lengths = torch.tensor([len(row) for row in chunk], dtype=torch.int64)
        kept = torch.tensor([float(k) for row in chunk for _, k in row], dtype=torch.float64)
        tensors.append((torch.tensor([x for row in chunk for x, _ in row], dtype=torch.float64), kept, lengths))
    totals = BatchTotals(*sum(counted(kept, lengths) for _, kept, lengths in tensors).tolist())
    for mode, loop in LOOPS.items():
        found = sum(float((token_weights(k, n, totals, mode, 7) * x).sum()) for x, k, n in tensors)
        assert found == pytest.approx(loop(counting) if counting else 0.0, rel=1e-6, abs=1e-9), mode
