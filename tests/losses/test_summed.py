"""Losses of clients by hand: four tokens with r = 0.5, 1, 2 and 5 in two rows, and the gradient of each."""

from __future__ import annotations

from math import log, sqrt

import pytest
import torch

from megatron_rl.config.declarations import POLICY_LOSSES
from megatron_rl.config.schema import ActorConfig
from megatron_rl.losses.policy import PolicyTokens
from megatron_rl.losses.summed import COUNTED, OF_THE_API, summed_losses

P, R, A = (-1.0, -2.0, -3.0, -0.5), (0.5, 1.0, 2.0, 5.0), (1.0, -1.0, 2.0, 1.0)
COUNTS, LENGTHS = (0.0, 1.0, 1.0, 1.0), (2, 2)
ROOT = sqrt(10.0)
ACTOR = ActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.2)
BY_HAND = {
    ("cross_entropy", ()): ((1.0, -2.0, 6.0, 0.5), (-1.0, 1.0, -2.0, -1.0)),
    ("importance_sampling", ()): ((-0.5, 1.0, -4.0, -5.0), (-0.5, 1.0, -4.0, -5.0)),
    ("ppo", ()): ((-0.5, 1.0, -2.4, -1.2), (-0.5, 1.0, 0.0, 0.0)),
    ("ppo", (("clip_high_threshold", 3.0),)): ((-0.5, 1.0, -4.0, -3.0), (-0.5, 1.0, -4.0, 0.0)),
    ("cispo", ()): ((0.5, -2.0, 12.0, 2.0), (-0.5, 1.0, -4.0, -4.0)),
    ("cispo", (("clip_low_threshold", 0.9),)): ((0.9, -2.0, 12.0, 2.0), (-0.9, 1.0, -4.0, -4.0)),
    ("dro", ()): (
        (1 + 0.025 * log(2) ** 2, -2.0, 6 + 0.025 * log(2) ** 2, 0.5 + 0.025 * log(5) ** 2),
        (-1 - 0.05 * log(2), 1.0, -2 + 0.05 * log(2), -1 + 0.05 * log(5)),
    ),
    ("dro", (("beta", 0.0),)): ((1.0, -2.0, 6.0, 0.5), (-1.0, 1.0, -2.0, -1.0)),
    ("gspo", ()): ((-1.0, 1.0, -2.4, -1.2), (-1.0, 1.0, 0.0, 0.0)),
    ("gspo", (("clip_high_threshold", 4.0),)): ((-1.0, 1.0, -2 * ROOT, -ROOT), (-1.0, 1.0, -2 * ROOT, -ROOT)),
    ("vanilla", ()): ((0.0, 1.0, -2.4, -1.2), (0.0, 1.0, 0.0, 0.0)),
    ("vanilla", (("clip_ratio_high", 1.5),)): ((0.0, 1.0, -4.0, -2.5), (0.0, 1.0, -4.0, 0.0)),
    ("gpg", ()): ((0.0, -2.0, 6.0, 0.5), (0.0, 1.0, -2.0, -1.0)),
}


def tokens(log_probs: torch.Tensor) -> PolicyTokens:
    given = torch.tensor(P) - torch.tensor(R).log()
    return PolicyTokens(log_probs, given, torch.tensor(A), torch.tensor(LENGTHS), torch.tensor(COUNTS))


@pytest.mark.parametrize("case", BY_HAND, ids=str)
def test_values_and_gradients_by_hand(case) -> None:
    """Would not catch a formula of the API that was misread here, too."""
    (name, changes), log_probs = case, torch.tensor(P, requires_grad=True)
    loss = summed_losses(ACTOR)[name]
    found = loss.function(tokens(log_probs), {**loss.defaults, **dict(changes)})
    found.sum().backward()
    value, gradient = BY_HAND[case]
    assert found.tolist() == pytest.approx(value, abs=1e-5) and log_probs.grad.tolist() == pytest.approx(
        gradient, abs=1e-5
    )


def test_every_policy_loss_has_its_name() -> None:
    """Those of the API keep its formulas, the others their own over the tokens that count, and read their settings.

    Would not catch a wrong formula, which `test_policy_variants` has by hand.
    """
    losses = summed_losses(ACTOR)
    assert losses.keys() == {*POLICY_LOSSES, *OF_THE_API} - {"bypass_mode"}
    for name in losses.keys() - OF_THE_API.keys():
        loss, declared = losses[name], POLICY_LOSSES[name]
        assert loss.reads == (COUNTED, "logprobs", "advantages")
        assert [key.rpartition("actor.")[2] for key in loss.keys.values()] == list(declared.keys)
        own = declared.function(tokens(torch.tensor(P)), ACTOR).loss * torch.tensor(COUNTS)
        assert loss.function(tokens(torch.tensor(P)), loss.defaults).tolist() == own.tolist(), name
