"""Counts of an exchange by structure against the whole plan: what arrives, buffers, and packed messages."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from cProfile import Profile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_published_shapes import GEMMA_4, write

from megatron_rl.config.load import load_config
from megatron_rl.hybrid_engine.eight_bit_members import EightBitTensors
from megatron_rl.hybrid_engine.plan import ExchangePlan, covers_training, plan_memory
from megatron_rl.hybrid_engine.schedule import most_packed
from megatron_rl.model.families import ParamSpec, eight_bit_names, tensors_of
from megatron_rl.model.families.adapter_params import merged_rows
from megatron_rl.parallel.rank_grid import RolloutGrid, TrainGrid
from megatron_rl.parallel.sharding import LogicalTensor, Segment
from megatron_rl.parallel.stages import StagePlan
from megatron_rl.planning.eight_bit_transition import EightBitTransition
from megatron_rl.planning.exchange_counts import ExchangeCounts
from megatron_rl.planning.hardware import load_hardware
from megatron_rl.planning.memory_advice import tried
from megatron_rl.planning.role_params import RoleParams
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.run_plan import RunPlan
from megatron_rl.planning.weights import ModelParams, TrainedWeights

REPOSITORY = Path(__file__).parents[2]
DEEPSEEK, LAST = "../../tests/port/verl_scripts/models/DeepSeek-V3", "num_layers_in_last_pipeline_stage"
ACTOR, ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout.tensor_model_parallel_size"
EP, DP = (f"actor_rollout_ref.rollout.{name}_parallel_size=4" for name in ("expert", "data"))


def layout(model: str, ranks: int, tp: int, pp: int, rollout_tp: int, *more: str) -> RunModels:
    """On nodes of 8."""
    sizes = [f"{ACTOR}.tensor_model_parallel_size={tp}", f"{ACTOR}.pipeline_model_parallel_size={pp}"]
    overrides = [f"actor_rollout_ref.model.path={REPOSITORY / 'configs/models' / model}", f"{ROLLOUT}={rollout_tp}"]
    overrides += [f"trainer.nnodes={max(1, ranks // 8)}", f"trainer.n_gpus_per_node={min(8, ranks)}", *sizes, *more]
    return RunModels(load_config(REPOSITORY / "configs/recipes/llama3_8b_grpo.yaml", overrides))


@pytest.mark.parametrize(
    "models",
    [
        lambda: layout("llama-3-8b", 16, 4, 2, 2),
        lambda: layout("llama-3-8b", 8, 2, 4, 1),
        lambda: layout("llama-3-8b", 8, 2, 4, 4, f"{ACTOR}.virtual_pipeline_model_parallel_size=2"),
        lambda: layout("llama-3-8b", 24, 4, 3, 2, f"{ACTOR}.num_layers_in_last_pipeline_stage=10"),
        lambda: layout("llama-3-8b", 8, 4, 2, 2, "actor_rollout_ref.rollout.drop_train_weights=true"),
        lambda: layout("qwen3-30b-a3b", 8, 2, 2, 4, f"{ACTOR}.expert_model_parallel_size=2"),
        lambda: layout("qwen3-30b-a3b", 8, 2, 2, 4, EP),
        lambda: layout("qwen3-30b-a3b", 8, 2, 2, 1, EP, DP),
        lambda: layout(DEEPSEEK, 8, 2, 2, 4, f"{ACTOR}.expert_model_parallel_size=2", f"{ACTOR}.{LAST}=30"),
    ],
    ids=[
        "two nodes",
        "one node",
        "chunks",
        "uneven",
        "dropped",
        "experts",
        "whole experts",
        "attention DP",
        "dense first",
    ],
)
def test_classes_count_for_all(models):
    """To the element, on every rank of the group. Would not catch a layer of a kind that these models lack."""
    counts_for_all(models())


def test_layers_of_other_sizes_are_of_other_classes(tmp_path):
    """Gemma-4's layers have parameters of equal names. Would not catch sizes that differ with the rank."""
    counts_for_all(layout(write(tmp_path / "model", GEMMA_4), 8, 2, 2, 4))


SMALL = 4096
"""Elements of a message: less than the largest pieces."""


def counts_for_all(found: RunModels) -> None:
    counts = found.resharding.exchange
    drop = found.config.actor_rollout_ref.rollout.drop_train_weights
    whole, _ = plan_memory(tensors_of(found.actor.specs), found.members_with(0), 0, drop)
    assert len(counts.classes) < len(whole.tensors)
    assert_equal(counts, whole, SMALL << 10)
    for number, held in enumerate(whole.held):
        assert counts.covers_training(number) == covers_training(whole.plans[number], held)


def assert_equal(counts: ExchangeCounts, whole: ExchangePlan, message: int) -> None:
    members = range(len(whole.members))
    assert counts.network_numels == [whole.numel_over_network(number) for number in members]
    assert counts.received_numels == [sum(piece.numel for piece in plan.received) for plan in whole.plans]
    assert counts.receive_buffer_numels == [plan.foreign_numel for plan in whole.plans]
    for number in (members[0], members[len(members) // 2], members[-1]):
        assert counts.most_packed(number, message) == most_packed(whole, number, message)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(*[st.sampled_from((1, 2, 4))] * 5),
    per_node=st.sampled_from((2, 3, 8)),
    layers=st.integers(4, 7),
    message=st.sampled_from((8, 64, SMALL)),
    drop=st.booleans(),
    whole_experts=st.booleans(),
)
def test_random_layouts(sizes, per_node, layers, message, drop, whole_experts):
    """Two kinds of layers, one with experts, in random stages; or both ways refuse. Would not catch adapters."""
    tp, pp, ep, etp, rollout_tp = sizes
    grid = TrainGrid(math.lcm(tp, ep * etp, rollout_tp) * pp, tp, pp, ep, etp)
    specs = {}
    for layer in range(layers):
        matrix = LogicalTensor(f"m{layer}", (Segment("q", (8, 5), 4), Segment("k", (4, 5), 2)), 0)
        norm = LogicalTensor(f"n{layer}", (Segment("n", (5,), 1),), None)
        experts = LogicalTensor(f"e{layer}", (Segment("up", (4, 8, 6), 8),), 1, is_expert=True)
        for tensor in (matrix, norm, *([experts] if layer % 3 else [])):
            specs[f"decoder.layers.{layer}.{tensor.name[0]}"] = ParamSpec(tensor, ())
    stages = StagePlan(layers, pp, last=layers - (layers - 1) // max(1, pp - 1) * (pp - 1) if pp > 1 else None)
    weights = TrainedWeights(ModelParams(specs), stages, grid, 1)
    rollout = RolloutGrid(grid, rollout_tp, rollout_tp if whole_experts else 1)
    members = weights.members(grid.exchange_group(0), rollout, per_node, 1)
    try:
        whole, _ = plan_memory(tensors_of(specs), members, 0, drop)
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            ExchangeCounts(tensors_of(specs), members, drop_train_weights=drop)
        return
    assert_equal(ExchangeCounts(tensors_of(specs), members, drop_train_weights=drop), whole, message)


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.tuples(*[st.sampled_from((1, 2, 4))] * 4),
    per_node=st.sampled_from((2, 3, 8)),
    layers=st.integers(2, 5),
    message=st.sampled_from((8, 64, SMALL)),
    whole_experts=st.booleans(),
)
def test_random_layouts_of_fp8_weights(sizes, per_node, layers, message, whole_experts):
    """Codes, scales and what stays, each as its whole plan. Would not catch a linear that should be of another view."""
    tp, pp, ep, rollout_tp = sizes
    grid = TrainGrid(math.lcm(tp, ep, rollout_tp) * pp, tp, pp, ep, 1)
    specs = {}
    for layer in range(layers * pp):
        name = f"decoder.layers.{layer}"
        qkv = LogicalTensor(f"qkv{layer}", (Segment("q", (32, 16), 4), Segment("k", (16, 16), 2)), 0)
        norm = LogicalTensor(f"norm{layer}", (Segment("n", (16,), 1),), None)
        experts = LogicalTensor(f"up{layer}", (Segment("up", (4, 16, 8), 16),), 1, is_expert=True)
        specs[f"{name}.self_attention.linear_qkv.weight"] = ParamSpec(qkv, ())
        specs[f"{name}.norm.weight"] = ParamSpec(norm, ())
        if layer % 3:
            specs[f"{name}.mlp.experts.w13"] = ParamSpec(experts, ())
    weights = TrainedWeights(ModelParams(specs), StagePlan(layers * pp, pp), grid, 1)
    rollout = RolloutGrid(grid, rollout_tp, rollout_tp if whole_experts else 1)
    members = weights.members(grid.exchange_group(0), rollout, per_node, 1)
    counted = EightBitTransition(specs, members, 4, 2)
    tensors = EightBitTensors.of(tensors_of(specs), eight_bit_names(specs), 4)
    assert tensors.codes and tensors.kept
    views = zip(counted.moved, (tensors.codes, tensors.scales, tensors.kept), tensors.members(members), strict=True)
    buffers = []
    for (size, counts), view, held in views:
        whole, _ = plan_memory(view, held, 0, False)
        assert_equal(counts, whole, message)
        buffers.append([size * plan.foreign_numel for plan in whole.plans])
    received = [counted.receive_buffers(number) for number in range(len(members))]
    assert received == [*map(list, zip(*buffers, strict=True))]


def test_work_for_671b_is_by_classes():
    """768 ranks, TP8 PP12 EP64: what is cut grows with stages and kinds. Would not catch slow steps."""
    experts = (f"{ACTOR}.expert_model_parallel_size=64", f"{ACTOR}.expert_tensor_parallel_size=1")
    found = layout(DEEPSEEK, 768, 8, 12, 32, *experts, f"{ACTOR}.{LAST}=6")
    counts = found.resharding.exchange
    assert len(counts.members) == 768
    assert len(counts.classes) < 330 < len(counts.tensors)
    assert sum(len(alike.pieces) for alike in counts.classes) < 200_000


def test_changes_that_do_not_touch_a_model_read_it_once():
    """Merged adapters on too few ranks: tens of variants, one reading of adapters, one exchange for each layout.
    Would not catch a variant that is slow otherwise.
    """
    lora = ("actor_rollout_ref.model.lora.rank=8", "actor_rollout_ref.model.lora.merge=true")
    config = layout("llama-3-8b", 2, 1, 2, 1, *lora).config
    calls = Profile(builtins=False)
    found = calls.runcall(RunPlan.of, config, dataclasses.replace(load_hardware("h100"), memory_bytes=2 << 34))
    assert found.fitting is not None and found.fitting.together
    of = Counter({entry.code: entry.callcount for entry in calls.getstats()})
    assert of[tried.__code__] > 10
    assert of[merged_rows.__code__] == 1 and of[RoleParams.of.__func__.__code__] <= 2
    assert of[ExchangeCounts.__init__.__code__] <= len(found.models._by_layout)
