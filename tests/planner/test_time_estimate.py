"""The time estimate: its arithmetic by hand, its calibration, and the table in the documentation."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.errors import ConfigError
from megatron_rl.planner.hardware import known_hardware, load_hardware
from megatron_rl.planner.published import calibrated, cost, held_out_error, points
from megatron_rl.planner.time import DECODE_OVERHEAD, LAUNCH_SECONDS, RL_SHARE, Estimator, Layout, Lengths, Load

REPOSITORY = Path(__file__).parents[2]
GPU = dataclasses.replace(load_hardware("h100"), matmul_efficiency=1.0)
LOAD = Load(64, 100, 100, 200, mini_batch=64, block_tokens=400, efficiency_share=1.0, overlaps_dp=True)


@given(st.floats(0.01, 0.99), st.integers(2, 100_000))
def test_lengths_have_their_mean_and_their_bound(share, bound):
    """Survival falls from 1 to 0, and its integral is the mean. Would not catch lengths of another distribution."""
    lengths = Lengths.with_mean(share * bound, bound)
    assert lengths.mean == pytest.approx(share * bound, rel=1e-3)
    survivals = [lengths.survival(bound * i / 400) for i in range(401)]
    assert survivals[0] == pytest.approx(1) and survivals[-1] == 0 and survivals == sorted(survivals, reverse=True)
    integral = bound / 400 * (sum(survivals) - survivals[0] / 2)
    assert integral == pytest.approx(share * bound, rel=0.1)
    median = lengths.quantile(0.5)
    assert 0 <= median <= bound and lengths.survival(median) == pytest.approx(0.5, abs=1e-6)


def test_training_is_work_over_peak_and_the_bubble():
    """One GPU, then four stages of eight micro-batches. Would not catch a wrong peak in a hardware file."""
    model = dataclasses.replace(cost("llama-3-8b"), num_params=0, head_params=0)  # no optimizer, no heavier stage
    flops = 3 * 64 * 200 * (2 * model.matrix_params + 2 * 32 * 4096 * 200)
    alone = Estimator(model, Layout(1, 8), GPU).train(LOAD)
    assert alone == pytest.approx(flops / 989e12)
    four = Estimator(model, Layout(4, 8, pp=4), dataclasses.replace(GPU, link_bandwidth=math.inf))
    assert four.train(dataclasses.replace(LOAD, block_tokens=1600)) == pytest.approx(alone / 4 * (1 + 3 / 8))
    chunked = dataclasses.replace(four, layout=Layout(4, 8, pp=4, vpp=2))
    assert chunked.train(dataclasses.replace(LOAD, block_tokens=1600)) == pytest.approx(alone / 4 * (1 + 3 / 16))
    again = Estimator(model, Layout(1, 8), GPU).train(dataclasses.replace(LOAD, recompute=True))
    assert again == pytest.approx(alone * 4 / 3)
    assert Estimator(model, Layout(1, 8), GPU).forward(LOAD) == pytest.approx(alone / 3)


def test_the_head_and_uneven_stages_set_the_pace():
    """Four stages of 8 micro-batches, by hand: the last one has the head, and 5 layers are not 8. Would not catch a
    stage whose layers differ.
    """
    model = dataclasses.replace(cost("llama-3-8b"), num_params=0)
    gpu = dataclasses.replace(GPU, link_bandwidth=math.inf)
    token = 2 * 32 * 4096 * 200 / 32 + 2 * (model.matrix_params - model.head_params) / 32
    layer, head = (3 * 1600 * flops / 989e12 for flops in (token, 2 * model.head_params))
    load = dataclasses.replace(LOAD, block_tokens=1600)
    even = Estimator(model, Layout(4, 8, pp=4), gpu).train(load)
    assert even == pytest.approx(8 * (8 * layer + head) + 24 * layer)
    uneven = Estimator(model, Layout(4, 8, pp=4, stage_layers=(9, 9, 9, 5)), gpu).train(load)
    assert head < 4 * layer and uneven == pytest.approx(8 * 9 * layer + 23 * layer + head)


def test_samples_are_dealt_out_whole():
    """64 samples over 48 ranks take as long as over 32. Would not catch ranks that wait for prompts."""
    model = dataclasses.replace(cost("llama-3-8b"), num_params=0)
    load = dataclasses.replace(LOAD, prompt=2000, block_tokens=8000)
    seconds = [Estimator(model, Layout(ranks, 8), GPU).train(load) for ranks in (32, 48, 64, 128)]
    assert seconds[0] == seconds[1] == pytest.approx(2 * seconds[2]) and seconds[2] == seconds[3]
    drawn = [Estimator(model, Layout(ranks, 8), GPU).generate(LOAD) for ranks in (32, 48, 64, 128)]
    assert drawn[0] == drawn[1] > drawn[2] == drawn[3]


def test_short_passes_take_what_launching_takes():
    """One sample of 200 tokens on 32 layers, and 8 at once. Would not catch graphs, which launch faster."""
    model = dataclasses.replace(cost("llama-3-8b"), num_params=0)
    gpu = dataclasses.replace(GPU, bfloat16_flops=1e20)
    found = Estimator(model, Layout(1, 8), gpu).forward(dataclasses.replace(LOAD, block_tokens=200))
    assert found == pytest.approx(64 * 32 * LAUNCH_SECONDS)
    assert Estimator(model, Layout(1, 8), gpu).forward(dataclasses.replace(LOAD, block_tokens=1600)) == found / 8


def test_decoding_reads_the_weights_once_a_token():
    """One answer of a known length without a prompt. Would not catch a slower kernel."""
    model = cost("llama-3-8b")
    load = Load(1, 0, 99.99, 100, mini_batch=1, block_tokens=1, decode_overhead=0.0)
    read = 16.06e9 / (3.35e12 * 0.8)
    assert Estimator(model, Layout(1, 8), GPU).generate(load) == pytest.approx(100 * read, rel=0.02)
    halves = Estimator(model, Layout(2, 8, rollout_tp=2), GPU).generate(load)
    assert halves == pytest.approx(100 * (read / 2 + 64 * 10e-6), rel=0.03)
    slower = dataclasses.replace(load, decode_overhead=0.01)
    assert Estimator(model, Layout(1, 8), GPU).generate(slower) == pytest.approx(100 * (read + 0.01), rel=0.02)


def test_experts_are_read_as_far_as_tokens_are_sent_to_them():
    """128 experts, 8 to a token. Would not catch experts that are used unevenly."""
    model = cost("qwen3-30b-a3b")
    dense = model.num_params * (1 - model.experts_share)
    assert model.num_params == pytest.approx(30.5e9, rel=0.01) and model.matrix_params == pytest.approx(3.0e9, rel=0.05)
    one = dense + model.num_params * model.experts_share * 8 / 128
    assert model.read_bytes(1) == pytest.approx(2 * one)
    assert model.read_bytes(1000) == pytest.approx(2 * model.num_params, rel=1e-3)


def test_shares_are_those_that_the_calibrating_points_give():
    """To 1%. Would not catch a point that was copied wrongly from its source."""
    found = calibrated()
    assert found["RL_SHARE"] == pytest.approx(RL_SHARE, rel=0.01)
    assert found["DECODE_OVERHEAD"] == pytest.approx(DECODE_OVERHEAD, rel=0.01)
    for gpu in ("h100", "a100"):
        assert found[f"matmul_efficiency {gpu}"] == pytest.approx(load_hardware(gpu).matmul_efficiency, rel=0.01)
    assert load_hardware("h200").matmul_efficiency == load_hardware("h100").matmul_efficiency


def test_held_out_points():
    """A bound on what the documentation states. Would not catch an error that two points share."""
    held = [point for point in points() if point.calibrates is None]
    assert len(held) >= 15 and held_out_error() < 0.2 and max(abs(point.error) for point in held) < 0.4


def test_documentation_holds_the_table_as_it_is():
    """Would not catch prose around it that is out of date."""
    command = [sys.executable, "scripts/planner_table.py", "--check"]
    finished = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False, env={"PYTHONPATH": "."}
    )
    assert finished.returncode == 0, finished.stderr


def test_hardware_files(tmp_path):
    """The project's, and one of the user's. Would not catch a number that is wrong."""
    assert known_hardware() == ["a100", "cpu", "h100", "h200"]
    assert all(load_hardware(name).memory_bytes > 1e9 for name in known_hardware())
    with pytest.raises(ConfigError, match="hardware h10 must be one of a100, cpu, h100, h200.*nearest: h100"):
        load_hardware("h10")
    file = tmp_path / "mine.yaml"
    file.write_text("memory_bytes: 1.0e+9\nflops: 3\n")
    with pytest.raises(ConfigError, match="it lacks bfloat16_flops.* and flops in it cannot be used"):
        load_hardware(str(file))
