"""From samples to a hardware file: least squares by hand, and samples that the clock itself has made."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from published.points import cost

from megatron_rl.planning.hardware import Overheads, load_hardware, read_hardware
from megatron_rl.profile.fit import (
    Probe,
    base_hardware,
    errors,
    fit_collectives,
    fit_context,
    fit_overheads,
    half_rows,
    not_negative,
    parallel_ranks,
    quantile,
    turns_share,
)
from megatron_rl.profile.hardware_file import hardware_text, sentences, tables
from megatron_rl.profile.profile import (
    CONTEXT_PASSES,
    CUT_GENERATIONS,
    CUT_PASSES,
    GENERATIONS,
    PASSES,
    Measured,
    ProfileRequest,
    tasks,
)
from megatron_rl.profile.samples import (
    GENERATE,
    SCORE,
    SCORE_ALONE,
    UPDATE,
    MeasuredSample,
    MeasuringTask,
    World,
    slowest,
)

MICRO_BATCH = 16
BASE = dataclasses.replace(load_hardware("cpu"), parallel_ranks=2.0, overheads=Overheads(launch=0.0, call=0.0))
TRUE = dataclasses.replace(
    BASE,
    overheads=Overheads(
        score_pass=2e-3, score_layer=1e-3, score_token=4e-9, update_pass=8e-3, update_layer=5e-3, update_token=1e-8,
        optimizer_step=6e-3, optimizer_layer=1e-3, generation=2e-3, request=2e-4, engine_step=3e-3, engine_layer=2e-4,
        engine_sequence=1e-5, context_layer=6e-4, context_token=3e-9, launch=0.0, call=0.0,
    ),
    collectives={2: 4e-4, 4: 9e-4},
    engine_collectives={2: 3e-4, 4: 7e-4},
)  # fmt: skip


def model(num_layers: int):
    found = cost("llama-3-8b")
    return dataclasses.replace(found, num_layers=num_layers, hidden=256, num_params=10**6, matrix_params=10**6,
                               head_params=10**4, q_size=256)  # fmt: skip


def probe(num_layers: int, tp_size: int, world_size: int, cp_size: int = 1) -> Probe:
    """What the clock says of a known machine, as if it had been measured there."""
    task = MeasuringTask("cpu", "none", num_layers, tp_size, world_size, cp_size=cp_size)
    empty = Probe(World(task), model(num_layers), "float32", MICRO_BATCH)
    alone = world_size == 1
    passes = CONTEXT_PASSES if cp_size > 1 else PASSES if alone else CUT_PASSES
    cases = [(kind, case) for kind in (SCORE, UPDATE) for case in passes]
    cases += [(GENERATE, case) for case in (GENERATIONS if alone else CUT_GENERATIONS) if cp_size == 1]
    samples = []
    for kind, case in cases:
        sample = MeasuredSample(kind, 0.0, case.rows, case.prompt, case.response)
        seconds = empty.expected(TRUE, sample) * TRUE.crowding(world_size)
        samples.append(dataclasses.replace(sample, seconds=seconds))
    return dataclasses.replace(empty, world=World(task, samples))


def test_least_squares_without_negative_numbers():
    """By hand: an exact solution, and one whose negative part is left out. Would not catch slow convergence."""
    assert not_negative(np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([2.0, 5.0])) == pytest.approx([2.0, 3.0])
    assert not_negative(np.array([[1.0, 1.0], [1.0, 2.0]]), np.array([3.0, 2.0])) == pytest.approx([2.5, 0.0])
    assert not_negative(np.array([[1.0]]), np.array([-1.0])) == [0.0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(0.0, 9.0), min_size=3, max_size=3), min_size=3, max_size=8), st.data())
def test_no_other_numbers_are_nearer(rows, data):
    """No small step that keeps all above 0 lessens the squares. Would not catch a wrong problem."""
    matrix = np.array(rows)
    sums = np.array(data.draw(st.lists(st.floats(-9.0, 9.0), min_size=len(rows), max_size=len(rows))))
    found = np.array(not_negative(matrix, sums))
    assert (found >= 0).all()
    least = float(((matrix @ found - sums) ** 2).sum())
    for place in range(3):
        for step in (1e-3, -1e-3):
            tried = found.copy()
            tried[place] = max(0.0, tried[place] + step)
            assert float(((matrix @ tried - sums) ** 2).sum()) >= least - 1e-6


def test_a_machine_is_found_again_from_its_samples():
    """All samples within 1%, and what decides them within 5%. Would not catch an overhead that the clock lacks."""
    alone, cut = [probe(2, 1, 1), probe(6, 1, 1)], [probe(6, 2, 4), probe(6, 4, 4)]
    known = dataclasses.replace(BASE, overheads=fit_overheads(BASE, alone))
    training, engine = fit_collectives(known, cut)
    found = dataclasses.replace(known, collectives=training, engine_collectives=engine)
    shared = [probe(6, 1, 4, cp_size=2)]
    found = dataclasses.replace(found, overheads=fit_context(found, shared))
    assert max(map(abs, errors(found, [*alone, *cut, *shared]))) < 0.01
    decisive = ("score_layer", "update_layer", "score_token", "engine_layer", "optimizer_step")
    for name in (*decisive, "context_layer", "context_token"):
        assert getattr(found.overheads, name) == pytest.approx(getattr(TRUE.overheads, name), rel=0.05), name
    assert training == pytest.approx(TRUE.collectives, rel=0.05)
    assert engine == pytest.approx(TRUE.engine_collectives, rel=0.05)


def test_numbers_of_kernels_by_hand():
    """A rate of 2 x 100 x 100 / 1 per row, with 8 rows' time on top; four ranks that do twice as much as one. Would not
    catch a rate that falls with more rows.
    """
    samples = [MeasuredSample("matmul", rows + 8.0, size=rows) for rows in (16, 64, 256)]
    assert half_rows(samples, 100.0) == pytest.approx((2 * 100.0**2, 8.0))
    assert parallel_ranks(MeasuredSample("small", 1.0), MeasuredSample("small", 2.0), 4, 8) == 2.0
    assert parallel_ranks(MeasuredSample("small", 1.0), MeasuredSample("small", 0.5), 4, 8) == 4.0
    assert parallel_ranks(MeasuredSample("small", 1.0), MeasuredSample("small", 1.0), 4, 2) == 2.0
    assert quantile([3.0, 1.0, 2.0, 4.0], 0.5) == 3.0 and quantile([1.0], 0.9) == 1.0


def test_what_turns_leave_by_hand():
    """Two groups of two on two cores: each needs twice its time beside the other if turns cost nothing. Would not catch
    groups that wait for each other.
    """
    task = MeasuringTask("cpu", "none", 2, 2, 4)
    beside = [MeasuredSample(SCORE, seconds, rows=4) for seconds in (2.5, 2.0, 8.0)]
    alone = [MeasuredSample(SCORE_ALONE, 1.0, rows=4) for _ in beside]
    assert turns_share(World(task, [*beside, *alone]), 2.0) == pytest.approx(0.8)
    assert turns_share(World(task, [*beside, *alone]), 4.0) == 1.0 and turns_share(World(task, beside), 2.0) == 1.0


def kernels(world_size: int, slower: float) -> World:
    found = [
        MeasuredSample(f"matmul {name}", slower * rows, size=rows)
        for name in ("float32", "bfloat16")
        for rows in (16, 64)
    ]
    found += [
        MeasuredSample("attention", 1.0, size=512),
        MeasuredSample("copy", slower, size=100.0),
        MeasuredSample("host copy", 2.0, size=50.0),
    ]
    found += [
        MeasuredSample("small operations", slower, size=2000),
        MeasuredSample("all-reduce", 4.0, size=1000.0),
    ]
    return World(MeasuringTask("cpu", "none", 2, 1, world_size), found)


def test_a_machine_of_kernels_by_hand():
    """Two ranks that slow each other down by a half: a rank's own bandwidths are as many times as high as those that
    it had beside the other. Would not catch a machine whose cores differ.
    """
    found = base_hardware(kernels(1, 1.0), kernels(2, 1.5), 8e9, "float32", 2, 2)
    assert found.parallel_ranks == pytest.approx(2 / 1.5) and found.crowding(2) == pytest.approx(1.5)
    assert found.float32_flops == pytest.approx(2 * 1024**2) and found.half_rows == pytest.approx(0.0, abs=1e-6)
    assert found.memory_bandwidth == pytest.approx(2 * 100 / 1.5 * 1.5 / 0.8)
    assert found.link_bandwidth == pytest.approx(1000.0 / (4.0 / 1.5) / 0.7) and found.host_bandwidth == 25.0
    assert base_hardware(kernels(1, 1.0), None, 8e9, "float32", 1, 2).parallel_ranks == 1.0


def test_the_file_reads_back(tmp_path):
    """As a hardware file, to the digits that it keeps. Would not catch numbers that were measured wrongly."""
    measured = Measured(TRUE, [probe(2, 1, 1).world], [0.05, -0.1, 0.2], 100.0, 20.0, (1.1, 1.0), {"gen": (0.5, 0.4)})
    text = hardware_text(measured)
    found = read_hardware(yaml.safe_load(text), tmp_path / "cpu.yaml")
    assert found == TRUE
    said = " ".join(sentences(measured))
    assert "10% in the median" in said and "20 s in addition to its steps" in said and "profiled in 100 s" in said
    assert [table.title for table in tables(measured)] == ["The machine", "On top of FLOPs and bytes", "A short run"]


def test_worlds_of_a_request(tmp_path):
    """Alone with either model, then every TP size, and CP 2; kernels once. Would not catch worlds that
    take too long.
    """
    found = tasks(ProfileRequest("cpu", 4), tmp_path)
    assert [(task.world_size, task.tp_size, task.cp_size, task.num_layers) for task in found] == [
        (1, 1, 1, 2), (1, 1, 1, 6), (4, 2, 1, 6), (4, 4, 1, 6), (4, 1, 2, 6)
    ]  # fmt: skip
    assert [task.kernels for task in found] == [True, False, True, False, False]
    assert [task.world_size for task in tasks(ProfileRequest("cpu", 3), tmp_path)] == [1, 1, 3]
    assert len(tasks(ProfileRequest("cpu", 1), tmp_path)) == 2


def test_the_slowest_rank_counts():
    """Of each sample. Would not catch ranks that measured different things of one kind."""
    first, second = ([MeasuredSample("a", x), MeasuredSample("b", y)] for x, y in ((1.0, 4.0), (2.0, 3.0)))
    assert [sample.seconds for sample in slowest([first, second])] == [2.0, 4.0]
    with pytest.raises(ValueError, match="zip"):
        slowest([first, second[:1]])
