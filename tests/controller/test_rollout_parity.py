"""What a run does where log-probs of rollout and trainer differ by more than their bounds; no processes."""

from __future__ import annotations

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

    config = load_config("configs/demo_cpu.yaml", ["actor_rollout_ref.rollout.logprob_diff_warn_steps=2"])
    said: list[str] = []
    algorithm = Algorithm(config, PhaseClock(lambda phase: None), said.append)
    lengths = torch.tensor([3])
    column = {
        name: ragged_from_lengths(torch.full((3,), value), lengths)
        for name, value in (("rollout_log_probs", -1.0), ("old_log_probs", -2.0))
    }
    batch = Batch(
        input_ids=ragged_from_lengths(torch.arange(4), lengths + 1),
        sampled=ragged_from_lengths(torch.tensor([False, True, True, True]), lengths + 1),
        **column,
    )
    if stops:
        with pytest.raises(ParityError, match="differ by 1 on sampled tokens"):
            algorithm.check_rollout_parity(batch, step)
    else:
        assert algorithm.check_rollout_parity(batch, step)["training/rollout_logprob_diff_max"] == 1.0
        assert len(said) == 1 and "only warns: actor_rollout_ref.rollout.logprob_diff_warn_steps=2" in said[0]
