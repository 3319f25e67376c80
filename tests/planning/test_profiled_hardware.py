"""Hardware that was profiled: its file, latencies between measured sizes, ranks that share cores, overheads by hand."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from published.points import cost

from megatron_rl.config.load import load_config
from megatron_rl.errors import ConfigError
from megatron_rl.planning.hardware import FOLDER, Overheads, latency, load_hardware, planned_hardware
from megatron_rl.planning.layout_sizes import Layout
from megatron_rl.planning.step_load import Load
from megatron_rl.planning.time import ALL_COLLECTIVES, DP_COLLECTIVES, Busy, Estimator

BARE = dataclasses.replace(
    load_hardware("cpu"),
    float32_flops=math.inf,
    bfloat16_flops=math.inf,
    memory_bandwidth=math.inf,
    link_bandwidth=math.inf,
    network_bandwidth=math.inf,
    overheads=Overheads(launch=0.0, engine_step=0.0),
)
"""Arithmetic and traffic take no time, so that all seconds are overheads."""
MODEL = dataclasses.replace(cost("llama-3-8b"), num_layers=4, hidden=10, num_params=0)
LOAD = Load(8, 6, 4, 4, mini_batch=4, block_tokens=20, epochs=1)
"""Two optimizer steps of 4 samples of 10 tokens, two samples a pass."""
SHARED = dataclasses.replace(LOAD, block_tokens=10)
"""The same, of two ranks of which each has half of the tokens."""


def overheads(**changes: float):
    return dataclasses.replace(BARE, overheads=dataclasses.replace(BARE.overheads, **changes))


def test_latency_between_and_beyond_measured_sizes():
    """Along the logarithm, by hand. Would not catch collectives whose latency is linear."""
    table = {2: 1.0, 8: 3.0}
    assert [latency(table, size) for size in (1, 2, 8)] == [0.0, 1.0, 3.0]
    assert latency(table, 4) == pytest.approx(2.0) and latency(table, 16) == pytest.approx(4.0)
    assert latency({4: 2.0}, 2) == pytest.approx(1.0) and latency({}, 4) == 0.0


def test_context_overheads_by_hand():
    """Two ranks share 20 tokens of a pass: four passes of 4 layers with one block of another's keys, three times as
    much in training; of four ranks three blocks; with a2a collectives instead. Would not catch a block of late keys
    that costs more than one of early ones.
    """
    known = overheads(context_layer=10.0, context_token=0.01)
    block = 10 + 10 * 10 * 0.01
    assert Estimator(MODEL, Layout(2, 4, cp=2), known).forward(SHARED) == pytest.approx(4 * 4 * block)
    assert Estimator(MODEL, Layout(2, 4, cp=2), known).train(SHARED) == pytest.approx(4 * 4 * 3 * block)
    block = 10 + 5 * 10 * 0.01
    quarter = dataclasses.replace(SHARED, block_tokens=5)
    assert Estimator(MODEL, Layout(4, 4, cp=4), known).forward(quarter) == pytest.approx(4 * 4 * 3 * block)
    exchanged = dataclasses.replace(known, collectives={2: 1.0})
    changes = Estimator(MODEL, Layout(2, 4, cp=2, cp_comm_type="a2a"), exchanged)
    assert changes.forward(SHARED) == pytest.approx(4 * 4 * 2)


def test_ranks_that_share_cores_take_turns():
    """Four ranks of which two can work at once: twice their work, or the critical path where that is longer. Would not
    catch ranks that slow each other down otherwise.
    """
    shared = dataclasses.replace(BARE, parallel_ranks=2.0)
    assert [shared.crowding(ranks) for ranks in (1, 2, 4, 6)] == [1, 1, 2, 3] and BARE.crowding(64) == 1
    estimator = Estimator(MODEL, Layout(4, 4), shared)
    assert estimator.seconds(Busy(3.0, 1.0)) == 3.0 and estimator.seconds(Busy(3.0, 2.0)) == 4.0
    dear = dataclasses.replace(shared, turns_share=0.8)
    assert [dear.crowding(ranks) for ranks in (2, 4)] == pytest.approx([1, 2.5])


def test_pass_overheads_by_hand():
    """Of one rank, of two stages, and of two TP ranks. Would not catch a layer that costs more than another."""
    one = overheads(score_pass=100.0, score_layer=10.0, score_token=0.01)
    passes = 4 * (100 + 4 * (10 + 20 * 10 * 0.01))
    assert Estimator(MODEL, Layout(1, 4), one).forward(LOAD) == pytest.approx(passes)
    stage = 100 + 2 * (10 + 20 * 10 * 0.01)
    assert Estimator(MODEL, Layout(2, 4, pp=2), one).forward(LOAD) == pytest.approx((4 + 1) * stage)
    chunks = 100 * 2 + 2 * (10 + 20 * 10 * 0.01)  # each of a stage's two chunks is a pass of its own
    halves = Estimator(MODEL, Layout(2, 4, pp=2, vpp=2), one).forward(LOAD)
    assert halves == pytest.approx(4 * chunks + chunks / 2)
    crowded = dataclasses.replace(one, parallel_ranks=1.0)
    assert Estimator(MODEL, Layout(2, 4, pp=2), crowded).forward(LOAD) == pytest.approx(4 * 2 * stage)
    cut = dataclasses.replace(one, collectives={2: 1.0})
    layer = 10 + 20 * 10 * 0.75 * 0.01
    assert Estimator(MODEL, Layout(2, 4, tp=2), cut).forward(LOAD) == pytest.approx(4 * (100 + 2 + 4 * (layer + 2)))


def test_update_overheads_by_hand():
    """Two optimizer steps of two passes each; half of the layers made again adds half of a forward pass. Would not
    catch collectives that a step does not wait for.
    """
    found = overheads(update_pass=100.0, update_layer=10.0, optimizer_step=7.0, optimizer_layer=0.5, score_layer=4.0)
    assert Estimator(MODEL, Layout(1, 4), found).train(LOAD) == pytest.approx(2 * (2 * (100 + 4 * 10) + 7 + 4 * 0.5))
    again = dataclasses.replace(LOAD, recompute=0.5)
    assert Estimator(MODEL, Layout(1, 4), found).train(again) == pytest.approx(2 * (2 * (100 + 4 * 12) + 9))
    spread = dataclasses.replace(overheads(), collectives={2: 1.0})
    both = DP_COLLECTIVES + ALL_COLLECTIVES
    assert Estimator(MODEL, Layout(2, 4), spread).train(LOAD) == pytest.approx(2 * both)


def test_generation_overheads_by_hand():
    """Answers of 4 tokens at once, all of the same length; two collectives a layer and two beside them. Would not catch
    steps in which some have ended.
    """
    found = overheads(generation=1000.0, request=100.0, engine_step=10.0, engine_layer=1.0, engine_sequence=0.5)
    alike = dataclasses.replace(LOAD, response=3.999)
    step = 10 + 4 * 1 + 8 * 0.5
    assert Estimator(MODEL, Layout(1, 4), found).generate(alike) == pytest.approx(1800 + 4 * step, rel=0.01)
    two = dataclasses.replace(overheads(), engine_collectives={2: 3.0})
    seconds = Estimator(MODEL, Layout(2, 4, rollout_tp=2), two).generate(alike)
    assert seconds == pytest.approx(4 * (2 * 4 + 2) * 3.0, rel=0.01)


def test_products_of_few_rows_are_slower():
    """Half the rate at `half_rows`, and attention at its share. Would not catch a rate that depends on the width."""
    model = dataclasses.replace(MODEL, matrix_params=10, head_params=0, q_size=0)
    gpu = dataclasses.replace(BARE, bfloat16_flops=1.0, matmul_efficiency=1.0, half_rows=20.0)
    load = dataclasses.replace(LOAD, efficiency_share=1.0)
    assert Estimator(model, Layout(1, 4), gpu).forward(load) == pytest.approx(2 * 80 * 20)
    attending = dataclasses.replace(model, matrix_params=0, q_size=1)
    slow = dataclasses.replace(gpu, half_rows=0.0, attention_share=0.5)
    assert Estimator(attending, Layout(1, 4), slow).forward(load) == pytest.approx(2 * 80 * 2 * 4 * 1 * 10)


def test_a_file_with_groups(tmp_path):
    """Read as it was written; what cannot be used is named. Would not catch a number that is wrong."""
    least = "memory_bytes: 1e+9\nbfloat16_flops: 1\nfloat32_flops: 1\nmemory_bandwidth: 1\nlink_bandwidth: 1\n"
    least = least.replace("1e+9", "1.0e+9") + "network_bandwidth: 1\nmatmul_efficiency: 1\n"
    file = tmp_path / "mine.yaml"
    file.write_text(least + "overheads: {engine_step: 0.5}\ncollectives: {2: 0.25}\nmeasured: [what, ever]\n")
    found = load_hardware(str(file))
    assert found.name == "mine" and found.collectives == {2: 0.25} and found.engine_collectives == {}
    assert found.overheads == Overheads(engine_step=0.5) and found.parallel_ranks == 0 and found.half_rows == 0
    for wrong, named in (
        ("overheads: {engine_steps: 1}", "overheads.engine_steps in it cannot"),
        ("collectives: {two: 1}", "collectives.two in it cannot"),
        ("collectives: {2: true}", "collectives.2 in it cannot"),
        ("collectives: 3", "collectives in it cannot"),
        ("error: much", "error in it cannot"),
        ("error: .inf", "error in it cannot"),
        ("attention_share: 0", "attention_share in it cannot"),
        ("- a list", "is not valid YAML"),
        (f"collectives: {'[' * 100_000}", "is not valid YAML"),
    ):
        file.write_text(least + wrong + "\n")
        with pytest.raises(ConfigError, match=named):
            load_hardware(str(file))
    file.write_text("[memory_bytes]")
    with pytest.raises(ConfigError, match="holds a list; it must hold numbers of a GPU"):
        load_hardware(str(file))


PPO = Path(__file__).parents[2] / "configs/llama3_70b_ppo.yaml"


def test_what_a_plan_is_made_for():
    """As named, else the run's file, else the device's default. Would not catch a file of another machine."""
    on_cpu = load_config(PPO, ["trainer.device=cpu"])
    assert planned_hardware(on_cpu).name == "cpu"
    assert planned_hardware(load_config(PPO)).name == "h100"
    on_cpu.trainer.hardware_file = str(FOLDER / "a100.yaml")
    assert planned_hardware(on_cpu).name == "a100" and planned_hardware(on_cpu, "h200").name == "h200"


@pytest.mark.parametrize(
    ("overrides", "num_nodes", "expected"),
    [
        ((), None, 7e9),  # eight nodes, captured graphs
        (("trainer.nnodes=1",), None, 4e9),
        ((), 1, 4e9),
        (("actor_rollout_ref.rollout.enforce_eager=true",), None, 5e9),
        (("trainer.nnodes=1", "actor_rollout_ref.rollout.enforce_eager=true"), None, 2e9),
        (("trainer.nnodes=1", "trainer.device=cpu"), 2, 0.7e9),
    ],
)
def test_memory_that_no_allocator_sees(overrides, num_nodes, expected):
    """Graphs and groups over nodes cost a GPU's memory, by hand. Would not catch another size of either."""
    assert planned_hardware(load_config(PPO, list(overrides)), None, num_nodes).context_bytes == expected
