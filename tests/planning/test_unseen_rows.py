"""The clock against published rows that no number of it comes from, and the data and arithmetic of their tables."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path

import pytest
from published.points import cost, hardware_of, points, transfer_seconds, unseen_points
from published.table import judged, median_error, rank_correlations
from published.unseen import judged_unseen, transfers

from megatron_rl.config.load import load_config
from megatron_rl.planning.hardware import load_hardware
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.transition import TransitionPlan

pytestmark = pytest.mark.instrument

REPOSITORY = Path(__file__).parents[2]
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def found():
    return judged_unseen()


def test_errors_are_no_larger_than_they_were(found):
    """Errors after one scalar per cluster, and the order of the rows. Would not catch one row that gets worse."""
    assert median_error(found) < 0.40
    in_turns, ahead = (
        [one for one in found if bool(one.point.ahead) == is_ahead and one.point.cluster == "NeMo-RL H100"]
        for is_ahead in (False, True)
    )
    qwen = [[one for one in rows if "qwen" in one.point.name] for rows in (in_turns, ahead)]
    assert [len(rows) for rows in qwen] == [3, 7]
    assert median_error(qwen[0]) < 0.12 and median_error(qwen[1]) < 0.18
    overall, inside = rank_correlations(found)
    assert overall > 0.78 and inside > 0.77


def test_scalars_come_from_the_known_points(found):
    """NeMo-RL's is the median of its points above; verl's two rows have each other's. Would not catch a row that was
    used to set a number."""
    assert not {point.name for point in points()} & {point.name for point in unseen_points()}
    assert all(point.sets is None for point in unseen_points())
    known = [one.point.published / one.estimate for one in judged() if one.point.cluster == "NeMo-RL H100"]
    assert {one.scalar for one in found if one.point.cluster == "NeMo-RL H100"} == {statistics.median(known)}
    one, other = (each for each in found if each.point.cluster == "verl H20")
    assert one.scalar == other.point.published / other.estimate and other.scalar == one.point.published / one.estimate


def test_steps_ahead_lie_between_the_trainers_side_and_both_in_turns(found):
    """Of every row that runs ahead. Would not catch a side that is too slow itself."""
    ahead = [one for one in found if one.point.ahead]
    assert {one.point.ahead for one in ahead} == {1, 8}
    for one in ahead:
        point, layout = one.point, one.point.layout
        alone = {phase: dataclasses.replace(point, ahead=0, phases=(phase,)).estimate() for phase in point.phases}
        ends = (layout.num_gpus - point.drawing, layout.rollout_tp)
        sent = transfer_seconds(2 * point.model.num_params, *ends, point.hardware)
        both = sum(alone.values()) + sent
        assert 0.999 * (both - alone["generation"]) <= one.estimate < both, point.name


def test_a_transfer_by_hand():
    """DeepSeek-V3's 671.03e9 parameters of 2 bytes over TP32, in 2.61 s of a NIC of 50 GB/s. Would not catch a wrong
    number of seconds."""
    one = next(each for each in transfers() if each.way == "NCCL reshard" and each.model == "deepseek-v3")
    assert one.needed == pytest.approx(671.026e9 * 2 / 32, rel=1e-5)
    assert one.rate == pytest.approx(16.07e9, rel=1e-3)
    assert one.estimate == pytest.approx(41.939e9 / 50e9 / 0.7, rel=1e-4)
    lonely = [each for each in transfers() if each.scalar is None]
    assert [each.scaled_error for each in lonely] == [None] * len(lonely)


def test_the_closed_form_is_the_plan_between_pools():
    """Qwen3-30B-A3B, EP8 x PP2 to TP8: norms, routers and key heads that ranks hold whole make 1%. Would not catch
    bytes that an executor sends twice."""
    megatron = "actor_rollout_ref.actor.megatron"
    overrides = (
        f"actor_rollout_ref.model.path={REPOSITORY / 'configs/models/qwen3-30b-a3b'}", f"{ROLLOUT}.nnodes=2",
        f"{ROLLOUT}.n_gpus_per_node=8", f"{ROLLOUT}.tensor_model_parallel_size=8",
        "actor_rollout_ref.hybrid_engine=false", f"{megatron}.tensor_model_parallel_size=1",
        f"{megatron}.pipeline_model_parallel_size=2", f"{megatron}.sequence_parallel=false",
    )  # fmt: skip
    config = load_config(REPOSITORY / "configs/recipes/qwen3_30b_a3b_grpo.yaml", list(overrides))
    gpu = load_hardware("h100")
    planned = TransitionPlan.of(RunModels(config)).seconds(gpu)
    num_bytes = 2 * cost("qwen3-30b-a3b").num_params
    assert transfer_seconds(num_bytes, 16, 8, hardware_of("h100")) == pytest.approx(planned, rel=0.015)
