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
from published.points import cost, hardware_of, points
from published.table import Judged, calibrated, judged, kendall, median_error, rank_correlations

from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import ConfigError
from megatron_rl.planning.answer_lengths import Lengths
from megatron_rl.planning.hardware import known_hardware, load_hardware
from megatron_rl.planning.layout_sizes import Layout
from megatron_rl.planning.step_load import COLLECTIVE_LATENCY, DECODE_OVERHEAD, RL_SHARE, Load
from megatron_rl.planning.step_time import generation_seconds
from megatron_rl.planning.time import LAUNCH_SECONDS, Estimator, ModelCost

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


def test_a_prompt_of_a_trie_is_computed_once():
    """Four samples of 100 + 100 tokens: 500 tokens pass, which see 50 keys of the prompt's 100, and 150 of the others.

    With fewer samples on a rank less is shared. Would not catch passes that share and do not say so.
    """
    load = dataclasses.replace(LOAD, rows_of_prompt=4)
    assert load.computed_length(4) == 125 and load.computed_length(2) == 150 and load.computed_length(0.5) == 200
    assert load.attended_length(4) == 2 * (100 * 50 + 400 * 150) / 500
    assert load.least_tokens == 64 * 125 and LOAD.least_tokens == LOAD.num_tokens
    assert LOAD.attended_length(64) == LOAD.length
    estimator = Estimator(cost("llama-3-8b"), Layout(1, 8), GPU)
    assert 0.6 < estimator.forward(load) / estimator.forward(LOAD) < 0.66


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
    assert halves == pytest.approx(100 * (read / 2 + 64 * COLLECTIVE_LATENCY), rel=0.03)
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


def test_experts_cost_flops_moves_and_messages():
    """By hand, one layer of 4 experts, 2 a token, on 2 ranks: 8 reads and writes of every row, at half of the speed as
    FLOPs, and half of the rows sent there and back. Would not catch experts that are used unevenly.
    """
    sizes = {"num_params": 4000, "matrix_params": 2000, "num_layers": 1, "hidden": 8, "q_size": 0}
    dense = ModelCost(**sizes, kv_bytes_per_token=0)
    model = dataclasses.replace(dense, num_experts=4, experts_per_token=2, experts_share=0.8)
    gpu = dataclasses.replace(GPU, bfloat16_flops=1e9, expert_share=0.5, memory_bandwidth=1e9, link_bandwidth=1e8)
    layout, rows = Layout(2, 8, ep=2), 2 * 64 * 200 / 2 * 8 * 2
    expected = 6400 * (2 * 2000 + 2 * 1600) / 1e9 + 2 * 8 * rows / 8e8 + rows / 7e7
    load = dataclasses.replace(LOAD, block_tokens=6400)
    assert Estimator(model, layout, gpu).forward(load) == pytest.approx(expected)
    wide, slow = dataclasses.replace(layout, gpus_per_node=1), dataclasses.replace(gpu, network_bandwidth=1e7)
    assert Estimator(model, wide, slow).forward(load) == pytest.approx(expected + rows / 7e6 - rows / 7e7)


def test_copies_on_one_node_share_its_network_cards():
    """16 copies on two nodes exchange over 8 cards, at TP 8 over one; in a node over its links. Would not catch cards
    that GPUs share.
    """
    model, gpu = cost("llama-3-8b"), dataclasses.replace(GPU, link_bandwidth=3e11, network_bandwidth=1e10)
    load = dataclasses.replace(LOAD, overlaps_dp=False)

    def exchange(layout: Layout) -> float:
        estimator = Estimator(model, layout, gpu)
        return estimator.train(load) - estimator.train(dataclasses.replace(load, overlaps_dp=True))

    assert exchange(Layout(16, 8)) == pytest.approx(model.num_params * 6 * 15 / 16 / 8e10 / 0.7)
    assert exchange(Layout(16, 8, tp=8)) == pytest.approx(model.num_params / 8 * 6 / 2 / 1e10 / 0.7)
    assert exchange(Layout(8, 8)) == pytest.approx(model.num_params * 6 * 7 / 8 / 3e11 / 0.7)


def test_shares_are_those_that_the_calibrating_points_give():
    """To 1%. Would not catch a point that was copied wrongly from its source."""
    found = calibrated()
    known = {"RL_SHARE": RL_SHARE, "DECODE_OVERHEAD": DECODE_OVERHEAD, "COLLECTIVE_LATENCY": COLLECTIVE_LATENCY}
    for gpu in ("h100", "a100"):
        known[f"matmul_efficiency {gpu}"] = load_hardware(gpu).matmul_efficiency
    known["expert_share h100"] = load_hardware("h100").expert_share
    assert found == {name: pytest.approx(value, rel=0.01) for name, value in known.items()}
    assert load_hardware("h200").matmul_efficiency == load_hardware("h100").matmul_efficiency
    shares = [hardware_of(name).expert_share for name in ("a100", "h200", "b200", "gb200", "h800", "a100_200gbps")]
    assert set(shares) == {load_hardware("h100").expert_share}


def test_held_out_points():
    """Bounds on what the documentation states, over the systems that do reinforcement learning and others. Would not
    catch an error that two points share.
    """
    found = judged()
    assert sum(one.counts for one in found) >= 40 and median_error(found) < 0.17
    overall, inside = rank_correlations(found)
    assert overall >= 0.9 and inside > 0.75
    systems = {one.point.cluster.split()[0] for one in found}
    assert {"HybridFlow", "ReaL", "NeMo-RL", "AReaL"} <= systems
    assert all(one.point.source for one in found)


def test_ranks_and_scalars_by_hand():
    """Three points in two clusters, and a tau of one discordant pair in three. Would not catch ties of estimates."""
    one, two, three = (
        dataclasses.replace(point, published=seconds) for point, seconds in zip(points()[:3], (1, 2, 3), strict=True)
    )
    found = [Judged(one, 1.0, 2.0), Judged(two, 4.0, 1.0), Judged(three, 3.0, 1.0)]
    assert [each.scaled for each in found] == [2.0, 4.0, 3.0]
    pairs = [(found[0], found[1]), (found[0], found[2]), (found[1], found[2])]
    assert kendall(pairs) == pytest.approx(1 / 3)
    free = [dataclasses.replace(each, point=dataclasses.replace(each.point, sets=None)) for each in found]
    assert median_error(free) == 1.0  # of 1.0, 1.0 and 0.0


def test_documentation_holds_the_table_as_it_is():
    """Would not catch prose around it that is out of date."""
    command = [sys.executable, "scripts/planner_table.py", "--check"]
    finished = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False, env={"PYTHONPATH": "."}
    )
    assert finished.returncode == 0, finished.stderr


def test_hardware_files(tmp_path):
    """The project's, and one of the user's. Would not catch a number that is wrong."""
    assert known_hardware() == ["a100", "b200", "cpu", "h100", "h200"]
    assert all(load_hardware(name).memory_bytes > 1e9 for name in known_hardware())
    with pytest.raises(
        ConfigError, match="hardware h10 must be one of a100, b200, cpu, h100, h200.*did you mean: h100"
    ):
        load_hardware("h10")
    file = tmp_path / "mine.yaml"
    file.write_text("memory_bytes: 1.0e+9\nflops: 3\n")
    with pytest.raises(ConfigError, match="it is missing bfloat16_flops.* and flops in it cannot be used"):
        load_hardware(str(file))


def test_a_sample_that_waits_for_answers_is_the_last():
    """Sixty-four samples: nothing changes where the engine takes longer, else the wait is added to one alone. Would not
    catch waits of different lengths.
    """
    load = Load(64, 0, 99.99, 100, mini_batch=1, block_tokens=1, decode_overhead=0.0)
    estimator, config = Estimator(cost("llama-3-8b"), Layout(1, 8), GPU), RunConfig()
    turns = config.actor_rollout_ref.rollout.multi_turn
    busy = estimator.generate(load)
    alone = estimator.generate(dataclasses.replace(load, num_samples=1))
    turns.planned_wait_s = 10.0
    assert generation_seconds(estimator, load, config) == busy
    turns.enable = True
    assert generation_seconds(estimator, load, config) == alone + 10.0
    turns.planned_wait_s = 1e-6
    assert generation_seconds(estimator, load, config) == busy
