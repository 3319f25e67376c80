"""Metric dicts from hand-sized tensors."""

import math

import pytest
import torch

from megatron_rl.observe.batch_metrics import (
    balance_metrics,
    expert_load_metrics,
    length_metrics,
    parity_metrics,
    quantile,
    score_metrics,
    throughput_metrics,
)


def test_score_metrics_by_hand():
    """Two samples, four tokens; Var(returns)=2/3, Var(returns - values)=1/3. Would not catch a biased variance."""
    metrics = score_metrics(
        scores=torch.tensor([1.0, 0.0]),
        totals=torch.tensor([0.8, -0.2]),
        advantages_flat=torch.tensor([1.0, -1.0, 2.0, 0.0]),
        returns_flat=torch.tensor([0.0, 1.0, 1.0, 2.0]),
        values_flat=torch.tensor([0.0, 1.0, 0.0, 1.0]),
    )
    assert metrics == {
        "critic/score/mean": 0.5,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "critic/rewards/mean": pytest.approx(0.3),
        "critic/rewards/max": pytest.approx(0.8),
        "critic/rewards/min": pytest.approx(-0.2),
        "critic/advantages/mean": 0.5,
        "critic/advantages/max": 2.0,
        "critic/advantages/min": -1.0,
        "critic/returns/mean": 1.0,
        "critic/returns/max": 2.0,
        "critic/returns/min": 0.0,
        "critic/values/mean": 0.5,
        "critic/values/max": 1.0,
        "critic/values/min": 0.0,
        "critic/vf_explained_var": pytest.approx(1 - (1 / 3) / (2 / 3 + 1e-5), abs=1e-6),
    }


def test_score_metrics_without_a_critic():
    """Nothing about values. Would not catch values that are zero instead of absent."""
    metrics = score_metrics(*torch.ones(4, 3), values_flat=None)
    assert "critic/returns/mean" in metrics and not [name for name in metrics if "values" in name or "vf_" in name]


def test_length_metrics_by_hand():
    """Integer lengths, one of four cut off. Would not catch truncation that was measured wrongly."""
    metrics = length_metrics(
        prompt_lengths=torch.tensor([6, 6, 8, 8]),
        response_lengths=torch.tensor([4, 1, 4, 3]),
        truncated=torch.tensor([True, False, False, False]),
    )
    assert metrics == {
        "prompt_length/mean": 7.0,
        "prompt_length/max": 8.0,
        "prompt_length/min": 6.0,
        "response_length/mean": 3.0,
        "response_length/max": 4.0,
        "response_length/min": 1.0,
        "response_length/clip_ratio": 0.25,
        "response/aborted_ratio": 0.0,
        "response_length_non_aborted/mean": 3.0,
        "response_length_non_aborted/max": 4.0,
        "response_length_non_aborted/min": 1.0,
        "response_length_non_aborted/clip_ratio": 0.25,
    }


def test_responses_without_a_token():
    """Lengths 0, 3 and nothing but 0; no value is NaN. Would not catch an empty response that is counted elsewhere."""
    prompts, truncated = torch.tensor([2, 2]), torch.tensor([False, True])
    metrics = length_metrics(prompts, torch.tensor([0, 3]), truncated)
    assert (metrics["response/aborted_ratio"], metrics["response_length/mean"]) == (0.5, 1.5)
    assert metrics["response_length_non_aborted/min"] == 3 and metrics["response_length_non_aborted/clip_ratio"] == 1
    nothing, zeros = torch.empty(0), torch.zeros(2)
    metrics = length_metrics(prompts, torch.tensor([0, 0]), truncated)
    metrics |= score_metrics(zeros, zeros, nothing, nothing, nothing) | parity_metrics(nothing, nothing)
    assert metrics["response/aborted_ratio"] == 1 and metrics["critic/rewards/max"] == 0
    assert all(map(math.isfinite, metrics.values())) and not any("advantages" in name for name in metrics)


def test_parity_metrics_by_hand():
    """Probabilities 1/2 against 1/4, and one equal token. Would not catch tokens in another order."""
    rollout, trainer = torch.tensor([0.5, 0.1]).log(), torch.tensor([0.25, 0.1]).log()
    assert parity_metrics(rollout, trainer) == {
        "training/rollout_logprob_diff_max": pytest.approx(math.log(2)),
        "training/rollout_logprob_diff_p99": pytest.approx(math.log(2)),
        "training/rollout_logprob_diff_mean": pytest.approx(math.log(2) / 2),
        "training/rollout_probs_diff_max": pytest.approx(0.25),
        "training/rollout_probs_diff_mean": pytest.approx(0.125),
    }


def test_quantile_by_hand():
    """Of 200 values two may be larger, of 99 none; NaN is not sorted away. Would not catch values of another step."""
    values = torch.arange(200.0)[torch.randperm(200)]
    assert quantile(values, 0.99) == 197 and quantile(values, 1.0) == 199
    assert quantile(torch.arange(99.0), 0.99) == 98 and quantile(torch.tensor([3.0]), 0.99) == 3
    assert math.isnan(quantile(torch.tensor([1.0, math.nan]), 0.5))


def test_throughput_is_per_rank():
    """1200 tokens, 2 s, 3 ranks: 200. Would not catch seconds that include validation."""
    assert throughput_metrics(num_tokens=1200, step_seconds=2.0, num_ranks=3) == {
        "perf/total_num_tokens": 1200.0,
        "perf/time_per_step": 2.0,
        "perf/throughput": 200.0,
    }


def test_loads_by_hand() -> None:
    """Two layers of four experts, one even and one not. Would not catch counts that are wrong before."""
    found = expert_load_metrics(torch.tensor([[5, 5, 5, 5], [10, 6, 4, 0]]), [0, 1])
    assert found == pytest.approx(
        {
            "actor/expert_load/max": 2.0,
            "actor/expert_load/mean": 1.5,
            "actor/expert_load/idle": 0.125,
            "actor/expert_load/layer_0": 1.0,
            "actor/expert_load/layer_1": 2.0,
        }
    )


def test_no_token_says_nothing() -> None:
    """Would not catch a layer without tokens among others."""
    assert expert_load_metrics(torch.zeros(2, 4, dtype=torch.int64), [0, 1]) == {}


def test_losses_by_hand() -> None:
    """Two layers, 1 and 3. Would not catch the two losses in each other's place before."""
    found = balance_metrics(torch.tensor([[1.0, 0.5], [2.0, 0.25]]), [1, 3])
    assert found == {
        "actor/moe_aux_loss/layer_1": 1.0,
        "actor/moe_aux_loss/layer_3": 2.0,
        "actor/moe_aux_loss/mean": 1.5,
        "actor/moe_z_loss/layer_1": 0.5,
        "actor/moe_z_loss/layer_3": 0.25,
        "actor/moe_z_loss/mean": 0.375,
    }
