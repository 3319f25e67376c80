"""Where a bias goes after an update."""

from __future__ import annotations

import torch

from megatron_rl.roles.expert_bias import moved


def test_a_bias_moves_against_the_load():
    """By hand: a mean of 4 tokens; one expert has more, one as many, two have fewer. Would not catch a large count that
    a float would round.
    """
    bias = torch.tensor([0.5, 0.0, -0.25, 0.0])
    counts = torch.tensor([9, 4, 3, 0])
    assert torch.equal(moved(bias, counts, 0.125), torch.tensor([0.375, 0.0, -0.125, 0.125]))


def test_an_even_load_moves_nothing():
    """Nor does none at all. Would not catch a rate of zero."""
    bias = torch.tensor([0.5, -1.0])
    for counts in (torch.tensor([3, 3]), torch.tensor([0, 0])):
        assert torch.equal(moved(bias, counts, 0.1), bias)
    assert not torch.equal(moved(bias, torch.tensor([2**40, 2**40 + 1]), 0.1), bias)
