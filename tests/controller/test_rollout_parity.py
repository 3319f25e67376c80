"""What a run does where log-probs of rollout and trainer differ by more than their bounds; no processes."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.config.load import load_config
from megatron_rl.controller.algorithm import Algorithm
from megatron_rl.errors import ParityError
from megatron_rl.observe.phase_clock import PhaseClock
from megatron_rl.records import Batch, ragged_from_lengths


@pytest.mark.parametrize(("step", "stops"), [(1, False), (2, False), (3, True)])
def test_large_differences_of_log_probs_warn_in_the_first_steps(step, stops):
    """With two steps that warn. Would not catch steps of a resumed run, which are counted on."""
    said: list[str] = []
    algorithm, batch = compared([-1.0] * 3, [-2.0] * 3, said, "logprob_diff_warn_steps=2")
    if stops:
        with pytest.raises(ParityError, match="differ by 1 on sampled tokens"):
            algorithm.check_rollout_parity(batch, step)
    else:
        assert algorithm.check_rollout_parity(batch, step)["training/rollout_logprob_diff_max"] == 1.0
        assert len(said) == 1 and "only warns: actor_rollout_ref.rollout.logprob_diff_warn_steps=2" in said[0]


@pytest.mark.parametrize(
    ("settings", "rollout", "outside"),
    [
        (["top_p=0.5"], [-1.5, -2.0, -1.4], 0.0),  # differences of 0.5, 0 and 0.6, and -log 0.5 is 0.693
        (["top_p=0.5"], [-1.2, -2.0, -2.0], 0.8 - math.log(2)),
        (["top_p=0.5"], [-2.3, -2.0, -2.0], 0.3),  # no token becomes rarer where others are left out
        (["top_p=0.5", "top_k=4"], [-0.1, -2.0, -2.0], 0.0),
        (["top_k=4"], [-0.1, -2.0, -2.2], 0.2),
        (["top_k=4"], [-0.1, -2.0, math.nan], math.nan),
    ],
)
def test_truncated_sampling_is_compared_with_the_mass_that_it_keeps(settings, rollout, outside):
    """The trainer's log-probs are -2. Would not catch an engine that keeps too many tokens of too little mass."""
    algorithm, batch = compared(rollout, [-2.0] * 3, [], "logprob_diff_warn_steps=0", *settings)
    if outside == 0:
        metrics = algorithm.check_rollout_parity(batch, 1)
        assert metrics["training/rollout_logprob_outside_max"] == algorithm.logprob_diff_max == 0
        assert metrics["training/rollout_logprob_diff_max"] == pytest.approx(max(rollout) + 2)
    else:
        number = f"{outside / 3:.3g}"
        with pytest.raises(ParityError, match=rf"differ by {number} more than top_p=.* explain \(0 to .*, in the mean"):
            algorithm.check_rollout_parity(batch, 1)


def compared(rollout, trainer, said, *settings):
    """The algorithm of a run with these settings of its rollout, and an answer of tokens with these log-probs."""
    config = load_config("configs/demo_cpu.yaml", [f"actor_rollout_ref.rollout.{setting}" for setting in settings])
    lengths = torch.tensor([len(rollout)])
    column = {
        name: ragged_from_lengths(torch.tensor(values), lengths)
        for name, values in (("rollout_log_probs", rollout), ("old_log_probs", trainer))
    }
    batch = Batch(
        input_ids=ragged_from_lengths(torch.arange(4), lengths + 1),
        sampled=ragged_from_lengths(torch.tensor([False, True, True, True]), lengths + 1),
        **column,
    )
    return Algorithm(config, PhaseClock(lambda phase: None), said.append), batch
