"""Plans over random models and layouts: executed on numbered elements, in one process and without collectives."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import expected_foreign, members_of, numbered_model, plan_for, tensors_of, training_buffers
from random_layouts import cases

from megatron_rl.hybrid_engine import schedule
from megatron_rl.hybrid_engine.layout import FOREIGN
from megatron_rl.hybrid_engine.plan import covers_training, make_plan
from megatron_rl.hybrid_engine.schedule import Step, local_copies, make_schedule
from megatron_rl.model.families import FAMILIES, ModelShape, param_map
from megatron_rl.parallel.rank_grid import RolloutGrid, TrainGrid
from megatron_rl.parallel.stages import StagePlan

LLAMA_70B = ModelShape(80, 8192, 64, 8, 128, 28672, 128256, tied=False)


def regions_read(buffers, regions):
    """The elements of a message as the sender packs them."""
    return torch.cat([buffers[r.buffer].as_strided(r.shape, r.stride, r.offset).flatten() for r in regions])


@dataclass
class Running:
    """One member on its way through its schedule; a step is over when its message is taken and its own has come."""

    steps: Iterator[Step]
    step: Step | None = None
    message: torch.Tensor | None = None
    receiving: bool = False

    def advance(self, buffers):
        self.step = next(self.steps, None)
        if self.step is not None:
            self.message = regions_read(buffers, self.step.send.regions) if self.step.send else None
            self.receiving = self.step.receive is not None


def execute(plan, model, message_numel):
    """Run all members' schedules, no message buffered; returns every member's buffers and the elements it received."""
    buffers = [training_buffers(member, model) for member in plan.members]
    for i, mine in enumerate(plan.plans):
        buffers[i][FOREIGN] = torch.zeros(mine.foreign_numel, dtype=torch.int64)
        for source, dest in local_copies(plan, i):
            target = buffers[i][dest.buffer].as_strided(dest.shape, dest.stride, dest.offset)
            target.copy_(buffers[i][source.buffer].as_strided(source.shape, source.stride, source.offset))
    ranks = [Running(iter(make_schedule(plan, i, message_numel))) for i in range(len(buffers))]
    for i, rank in enumerate(ranks):
        rank.advance(buffers[i])
    received = [0] * len(buffers)
    while any(rank.step for rank in ranks):
        moved = False
        for i, rank in enumerate(ranks):
            if rank.step and rank.receiving:
                peer = ranks[rank.step.receive.peer]
                if peer.message is not None and peer.step.send.peer == i:
                    assert peer.message.numel() == rank.step.receive.numel <= message_numel
                    received[i] += scatter(buffers[i], rank.step.receive.regions, peer.message)
                    peer.message, rank.receiving, moved = None, False, True
        for i, rank in enumerate(ranks):
            if rank.step and rank.message is None and not rank.receiving:
                rank.advance(buffers[i])
                moved = True
        assert moved, "the schedule blocks"
    return buffers, received


def scatter(buffers, regions, message):
    """Unpack a message where nothing has been written yet; returns its elements."""
    for r, part in zip(regions, message.split([r.numel for r in regions]), strict=True):
        target = buffers[r.buffer].as_strided(r.shape, r.stride, r.offset)
        assert not target.any(), "an element arrived twice"
        target.copy_(part.view(r.shape))
    return message.numel()


EXCHANGES = {
    "case": cases(),
    "message_numel": st.sampled_from([7, 64, 1 << 20]),
    "direct_numel": st.sampled_from([2, 20, 1 << 20]),
}


@settings(max_examples=15, deadline=None)
@given(**EXCHANGES)
def test_every_needed_element_arrives_once_and_nothing_else(**drawn):
    """Right values at the right places, bytes = needed - held, no blocking. Would not catch errors of `shard_of`."""
    check_exchange(**drawn)


@pytest.mark.exhaustive
@pytest.mark.weekly
@settings(max_examples=300, deadline=None)
@given(**EXCHANGES)
def test_many_more_exchanges(**drawn):
    """The same, for longer."""
    check_exchange(**drawn)


def check_exchange(case, message_numel: int, direct_numel: int) -> None:
    shape, architecture, rollout, stages, options = case
    plan, tensors = plan_for(shape, architecture, rollout, stages, **options)
    model = numbered_model(tensors)
    with mock.patch.object(schedule, "DIRECT_NUMEL", direct_numel):
        buffers, received = execute(plan, model, message_numel)
    for i, member in enumerate(plan.members):
        mine = plan.plans[i]
        assert torch.equal(buffers[i][FOREIGN], expected_foreign(plan, i, model))
        own = training_buffers(member, model)
        assert all(torch.equal(buffers[i][number], data) for number, data in own.items())
        # Independent of the plan: sets of numbered elements that are needed, and that are held.
        held = torch.cat([data.flatten() for data in own.values()]).unique()
        needed = buffers[i][FOREIGN].unique()
        lacking = needed[~torch.isin(needed, held)]
        assert received[i] >= (lacking > 0).sum()
        if shape.num_kv_heads % rollout.tp_size == 0:
            assert received[i] == (lacking > 0).sum() == mine.numel_lacking


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_experts_that_arrive_follow_the_closed_form(case):
    """M_e / t_g minus what a rank keeps of its stage, for experts that generation cuts and for whole ones.

    Would not catch a share that is wrong in the plan and in `kept_share` alike.
    """
    shape, architecture, rollout, stages, options = case
    plan, tensors = plan_for(shape, architecture, rollout, stages, **options)
    train, whole = rollout.train, sum(tensor.numel for tensor in tensors.values() if tensor.is_expert)
    for member, mine in zip(plan.members, plan.plans, strict=True):
        held = sum(slot.shard.numel for slot in member.held if tensors[slot.name].is_expert)
        of_stage = held * train.ep_size * train.expert_tp_size
        kept = rollout.kept_share(member.rank, of_experts=True) * of_stage
        assert sum(p.numel for p in mine.received if tensors[p.name].is_expert) == whole / rollout.tp_size - kept


@settings(max_examples=20, deadline=None)
@given(case=cases())
def test_what_crosses_to_a_node_crosses_once(case):
    """Each piece reaches a node in phase 0 from one rank at most. Would not catch an unfair choice of that rank."""
    shape, architecture, rollout, stages, options = case
    plan, _ = plan_for(shape, architecture, rollout, stages, **options)
    node = [member.node for member in plan.members]
    crossings = [
        (piece.name, piece.segment, piece.box, node[piece.dest])
        for mine in plan.plans
        for piece in mine.received
        if node[piece.source] != node[piece.dest]
    ]
    assert len(crossings) == len(set(crossings))
    for mine in plan.plans:
        for piece in mine.received:
            assert piece.phase == 0 or node[piece.source] == node[piece.dest]


def test_tp4_to_tp2_by_hand():
    """Who sends what to whom on four ranks of one node. Would not catch a wrong place inside the buffer."""
    shape = ModelShape(1, 8, 4, 4, 2, 8, 64, tied=False)
    plan, _ = plan_for(shape, "LlamaForCausalLM", RolloutGrid(TrainGrid(4, 4, 1), 2), StagePlan(1, 1))
    for number, mine in enumerate(plan.plans):
        partner = number ^ 1
        assert {piece.source for piece in mine.received} == {partner}
        assert mine.shared == {
            "model.norm.weight",
            "model.layers.0.input_layernorm.weight",
            "model.layers.0.post_attention_layernorm.weight",
        }
        # Half of the cut elements are needed, a quarter is held: qkv, o, gate_up, down, embedding, head.
        cut = 24 * 8 + 8 * 8 + 16 * 8 + 8 * 8 + 2 * 64 * 8
        assert mine.numel_needed == cut // 2 and mine.numel_lacking == cut // 4
    (query,) = [
        p for p in plan.plans[3].received if (p.name, p.segment) == ("model.layers.0.self_attn.qkv_proj.weight", 0)
    ]
    assert (query.box, query.source, query.phase) == (((4, 6), (0, 8)), 2, 0)


def test_stages_on_other_nodes_are_fetched_once_and_passed_on():
    """TP2 PP2 -> TP1 with a node per stage: phase 0 at the same TP coordinate, phase 1 between TP neighbours."""
    shape = ModelShape(2, 8, 2, 2, 2, 8, 64, tied=False)
    rollout = RolloutGrid(TrainGrid(4, 2, 2), 1)
    plan, _ = plan_for(shape, "LlamaForCausalLM", rollout, StagePlan(2, 2), per_node=2)
    for number, mine in enumerate(plan.plans):
        stage = number // 2
        for piece in mine.received:
            from_other_node = piece.source // 2 != stage
            is_cut = "norm" not in piece.name
            if from_other_node:
                assert piece.phase == 0 and (piece.source % 2 == number % 2 or not is_cut)
            else:
                assert piece.source == number ^ 1 and (piece.phase == 1) == (piece.owner // 2 != stage)


def test_what_training_shares_and_what_can_be_dropped():
    """k = 1 shares its stage, k = 2 only what is not cut. Would not catch sharing of equal shapes cut differently."""
    shape = ModelShape(2, 8, 4, 4, 2, 8, 70, tied=True)
    stages = StagePlan(2, 2)
    same, _ = plan_for(shape, "Qwen2ForCausalLM", RolloutGrid(TrainGrid(4, 2, 2), 2), stages)
    merged, _ = plan_for(shape, "Qwen2ForCausalLM", RolloutGrid(TrainGrid(4, 2, 2), 1), stages, share=False)
    wider, _ = plan_for(shape, "Qwen2ForCausalLM", RolloutGrid(TrainGrid(4, 2, 2), 4), stages, share=False)
    for number in range(4):
        assert same.plans[number].shared == set(same.held[number])
        assert not merged.plans[number].shared and covers_training(merged.plans[number], merged.held[number])
        assert not covers_training(wider.plans[number], wider.held[number])
    # The last stage's copy of the tied embedding is not sent to it.
    assert not any(piece.name == "model.embed_tokens.weight" for plan in same.plans[2:] for piece in plan.received)


def test_missing_elements_are_named():
    """A stage that nobody holds. Would not catch a tensor that no member mentions at all."""
    rollout, stages = RolloutGrid(TrainGrid(2, 2, 1), 2), StagePlan(1, 1)
    specs = param_map(FAMILIES["LlamaForCausalLM"], ModelShape(1, 8, 2, 2, 2, 8, 64, tied=False))
    members = members_of([0, 1], rollout, specs, stages)[:1]
    with pytest.raises(ValueError, match=r"training holds 32 of the 64 elements of .*qkv_proj.*\.q in 1 boxes|holds"):
        make_plan(tensors_of(specs), members, share_memory=[True])


@pytest.mark.parametrize(
    ("world_size", "tp", "pp", "rollout_tp"),
    [
        (512, 8, 4, 4),
        pytest.param(512, 8, 4, 1, marks=pytest.mark.exhaustive),
        pytest.param(4096, 8, 16, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_plans_of_70b_take_seconds(world_size, tp, pp, rollout_tp):
    """Every rank's part of 512 and of 4096 ranks: bytes by formula. Would not catch a plan that is slow to bind."""
    start = time.perf_counter()
    rollout, stages = RolloutGrid(TrainGrid(world_size, tp, pp), rollout_tp), StagePlan(80, pp)
    plan, tensors = plan_for(LLAMA_70B, "LlamaForCausalLM", rollout, stages)
    steps = make_schedule(plan, 3, 1 << 23)
    assert time.perf_counter() - start < 20
    # All exchange groups are alike, so one stands for the others.
    groups = rollout.train.exchange_groups()
    assert sorted(rank for group in groups for rank in group) == list(range(world_size))
    norms = sum(tensor.numel for tensor in tensors.values() if tensor.tp_dim is None)
    cut = sum(tensor.numel for tensor in tensors.values()) - norms
    for number, mine in enumerate(plan.plans):
        held = sum(slot.shard.numel for slot in plan.members[number].held)
        assert mine.numel_lacking == cut // rollout_tp + norms - held
        assert sum(piece.numel for piece in mine.received) == mine.numel_lacking
    assert all(leg.numel <= 1 << 23 for step in steps for leg in (step.send, step.receive) if leg)


def test_long_runs_travel_as_they_lie_and_the_rest_in_buckets():
    """TP2 -> TP1 by hand: rows without gaps are direct, columns are packed. Would not catch a slow threshold."""
    shape = ModelShape(1, 8, 2, 2, 4, 16, 64, tied=False)
    plan, _ = plan_for(shape, "LlamaForCausalLM", RolloutGrid(TrainGrid(2, 2, 1), 1), StagePlan(1, 1))
    with mock.patch.object(schedule, "DIRECT_NUMEL", 64):
        legs = [step.receive for step in make_schedule(plan, 0, 200)]
    # Head and embedding: 32 rows of 8 in two messages each. Gate and up: 8 rows of 8. q, k, v: 4 rows of 8, too short.
    assert [leg.numel for leg in legs if leg.is_direct] == [200, 56, 64, 64, 200, 56]
    # The columns of down and of o between them, and q, k, v.
    assert sorted(leg.numel for leg in legs if not leg.is_direct) == [64 + 32 + 96]
