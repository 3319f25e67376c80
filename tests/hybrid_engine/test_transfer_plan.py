"""Plans of transfers between two pools: once out of training, once into each receiver, and nobody waits for ever."""

from __future__ import annotations

import math
import random
import time
from collections import Counter, defaultdict
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import numbered_model, tensors_of, transfer_ends
from random_layouts import cases
from simulated_ranks import execute, is_right, schedules_of, view

from megatron_rl.hybrid_engine import transfer_plan
from megatron_rl.hybrid_engine.layout import FOREIGN
from megatron_rl.hybrid_engine.schedule import make_schedule
from megatron_rl.hybrid_engine.transfer_plan import PARTS_PER_CHUNK, make_transfer_plan, model_numel
from megatron_rl.model.families import FAMILIES, ModelShape, param_map
from megatron_rl.parallel.rank_grid import TrainGrid
from megatron_rl.parallel.sharding import box_index
from megatron_rl.parallel.stages import StagePlan

NODES = st.lists(st.integers(0, 3), min_size=1, max_size=8)
LLAMA_70B = ModelShape(80, 8192, 64, 8, 128, 28672, 128256, tied=False)


def plan_of(shape, architecture, train, stages, rollout_tp, num_replicas, min_chunk=1, **options):
    """(plan, tensors, number of senders)."""
    specs = param_map(FAMILIES[architecture], shape)
    senders, receivers = transfer_ends(train, specs, stages, rollout_tp, num_replicas, **options)
    tensors = tensors_of(specs)
    with mock.patch.object(transfer_plan, "MIN_CHUNK", min_chunk):
        return make_transfer_plan(tensors, senders, receivers), tensors, len(senders)


def classes_of(plan, num_senders):
    """(holders, receivers) -> elements, read from who received what and who holds it."""
    wanting = defaultdict(set)
    for number, mine in enumerate(plan.plans):
        for piece in mine.received:
            wanting[piece.name, piece.segment, piece.box].add(number)
    found = Counter()
    for (name, segment, box), numbers in wanting.items():
        having = []
        for number in range(num_senders):
            slot = plan.held[number].get(name)
            parts = [part for part in slot.shard.parts if part.segment == segment] if slot else []
            if any(all(a <= c and d <= b for (a, b), (c, d) in zip(p.box, box, strict=True)) for p in parts):
                having.append(number)
        found[tuple(having), tuple(sorted(numbers))] += math.prod(stop - start for start, stop in box)
    return found


def assert_balanced(plan, num_senders, min_chunk):
    """Ranks with the same choice differ by one chunk at most, in what they send out of training and in what they fetch.

    A chunk is a class's even share for its ranks, or `min_chunk`, and one box more, an eighth of it.
    """
    moved = Counter()
    for mine in plan.plans:
        for piece in mine.received:
            if piece.phase == 0:
                moved["sent", piece.source] += piece.numel
                moved["fetched", piece.dest] += piece.numel
    classes = classes_of(plan, num_senders)
    for way, side in (("sent", 0), ("fetched", 1)):
        alike = defaultdict(list)
        for number in range(len(plan.members)):
            mine = frozenset(key for key in classes if number in key[side])
            alike[mine].append(number)
        for mine, numbers in alike.items():
            sizes = [max(-(-classes[key] // math.lcm(*map(len, key))), min_chunk) for key in mine]
            longest = max((size + -(-size // PARTS_PER_CHUNK) for size in sizes), default=0)
            counts = [moved[way, number] for number in numbers]
            assert max(counts) - min(counts) <= longest


@st.composite
def pools(draw):
    """Arguments of `plan_of`: a small random model, two random pools, and the node of each of their ranks."""
    shape, architecture, rollout, stages, options = draw(cases())
    return (
        (shape, architecture, rollout.train, stages, rollout.tp_size, draw(st.integers(1, 4))),
        {
            "min_chunk": draw(st.sampled_from([1, 50, 1 << 18])),
            "train_nodes": draw(NODES),
            "rollout_nodes": draw(NODES),
            "train_multiple": options["train_multiple"],
        },
    )


@settings(max_examples=30, deadline=None)
@given(pools=pools())
def test_every_element_leaves_training_once_and_reaches_every_receiver_once(pools) -> None:
    """Random pools on random nodes, every element counted at both ends. Would not catch errors of `shard_of`."""
    check_elements(pools)


@pytest.mark.exhaustive
@settings(max_examples=500, deadline=None)
@given(pools=pools())
def test_elements_of_many_more_pools(pools) -> None:
    """The same, for longer."""
    check_elements(pools)


def check_elements(pools) -> None:
    arguments, options = pools
    plan, tensors, num_senders = plan_of(*arguments, **options)
    left = {
        (name, number): torch.zeros(segment.shape, dtype=torch.int64)
        for name, tensor in tensors.items()
        for number, segment in enumerate(tensor.segments)
    }
    for number, mine in enumerate(plan.plans):
        came = torch.zeros(mine.foreign_numel, dtype=torch.int64)
        for piece in mine.received:
            view({FOREIGN: came}, plan.dest_slot(piece).region(piece.segment, piece.box)).add_(1)
            if piece.phase == 0:
                assert piece.source == piece.owner < num_senders <= number
                left[piece.name, piece.segment][box_index(piece.box)] += 1
            else:
                assert piece.source >= num_senders
                is_near = plan.members[piece.source].node == plan.members[number].node
                assert is_near == (piece.phase == 2)
        assert not mine.local and int(came.sum()) == mine.numel_needed == mine.numel_lacking
        assert int(came.max()) == 1 if number >= num_senders else came.numel() == 0
    assert all(bool((count == 1).all()) for count in left.values())
    assert_balanced(plan, num_senders, options["min_chunk"])


def check_schedules(pools, message_numel: int, direct_numel: int, seed: int, laziness: float) -> None:
    """Run the steps of all ranks with messages that are late, and compare every rollout shard with the model."""
    arguments, options = pools
    plan, tensors, _ = plan_of(*arguments, **options)
    model, schedules = numbered_model(tensors), schedules_of(plan, message_numel, direct_numel)
    assert is_right(plan, execute(plan, schedules, model, random.Random(seed), laziness), model)


SCHEDULES = {
    "pools": pools(),
    "message_numel": st.sampled_from([7, 64, 1 << 20]),
    "direct_numel": st.sampled_from([2, 20, 1 << 20]),
    "seed": st.integers(0, 1 << 16),
    "laziness": st.sampled_from([0.3, 0.9, 1.0]),
}


@settings(max_examples=12, deadline=None)
@given(**SCHEDULES)
def test_nothing_is_passed_on_before_it_came_and_no_rank_blocks(**arguments) -> None:
    """Whatever order messages come in. Would not catch an executor that does not keep to `Step.after`."""
    check_schedules(**arguments)


@pytest.mark.exhaustive
@pytest.mark.weekly
@settings(max_examples=200, deadline=None)
@given(**SCHEDULES)
def test_many_more_schedules(**arguments) -> None:
    """The same, for longer."""
    check_schedules(**arguments)


def moved_numel(plan) -> dict[tuple[int, int, int], int]:
    """(phase, source, dest) -> elements."""
    found = Counter()
    for mine in plan.plans:
        for piece in mine.received:
            found[piece.phase, piece.source, piece.dest] += piece.numel
    return dict(found)


def test_two_replicas_on_two_nodes_by_hand() -> None:
    """TP2 PP2 -> two replicas of TP2. Would not catch a wrong place inside the buffers."""
    # Cut: qkv 24 x 8, o 8 x 8, gate and up 16 x 8, down 8 x 8 in each of two layers; embedding and head 64 x 8.
    shape = ModelShape(2, 8, 4, 4, 2, 8, 64, tied=False)
    arguments = (shape, "LlamaForCausalLM", TrainGrid(4, 2, 2), StagePlan(2, 2), 2, 2)
    layer, vocabulary, norm = 24 * 8 + 8 * 8 + 16 * 8 + 8 * 8, 64 * 8, 8
    stage = (layer + vocabulary) // 2
    plan, tensors, _ = plan_of(*arguments, min_chunk=1, rollout_nodes=[1, 1, 2, 2])
    assert model_numel(tensors) == 4 * stage + 5 * norm
    moved = moved_numel(plan)
    cut_only = {key: count - count % (stage // 2) for key, count in moved.items()}
    # Senders 0 to 3 are (tp, stage) = (0, 0) (1, 0) (0, 1) (1, 1); receivers 4 to 7 TP ranks 0, 1, 0, 1.
    for sender, receivers in ((0, (4, 6)), (1, (5, 7)), (2, (4, 6)), (3, (5, 7))):
        assert [cut_only[0, sender, receiver] for receiver in receivers] == [stage // 2, stage // 2]
    # Each node's half of both stages crosses to the other once; inside nodes only norms, which both TP ranks need.
    for receiver in (4, 5, 6, 7):
        assert cut_only[1, receiver, (receiver - 4 + 2) % 4 + 4] == stage
    assert all(count <= 5 * norm for (phase, _, _), count in moved.items() if phase == 2)
    assert sum(count for (phase, _, _), count in moved.items() if phase == 0) == model_numel(tensors)


def test_data_parallel_holders_share_what_leaves() -> None:
    """DP4 -> one rank: each holder sends a quarter, to within one row. Would not catch an unfair order in time."""
    shape = ModelShape(2, 8, 4, 4, 2, 8, 64, tied=False)
    plan, tensors, _ = plan_of(shape, "LlamaForCausalLM", TrainGrid(4, 1, 1), StagePlan(2, 1), 1, 1)
    sent = [moved_numel(plan)[0, sender, 4] for sender in range(4)]
    assert sum(sent) == model_numel(tensors) and max(sent) - min(sent) <= 2 * 64


@pytest.mark.parametrize(
    ("train", "rollout_tp", "num_replicas"),
    [(TrainGrid(64, 8, 4), 4, 8), (TrainGrid(64, 8, 4), 8, 4), (TrainGrid(16, 8, 1), 2, 4)],
    ids=["TP8PP4DP2-8xTP4", "TP8PP4DP2-4xTP8", "TP8DP2-4xTP2"],
)
def test_a_transfer_for_70b_is_planned_in_seconds(train, rollout_tp, num_replicas) -> None:
    """Time, and balance on both sides. Would not catch a plan that is slow to bind to memory."""
    start = time.perf_counter()
    rollout_nodes = [100 + rank // 8 for rank in range(rollout_tp * num_replicas)]
    train_nodes = [rank // 8 for rank in range(train.world_size)]
    plan, tensors, num_senders = plan_of(
        *(LLAMA_70B, "LlamaForCausalLM", train, StagePlan(80, train.pp_size), rollout_tp, num_replicas),
        min_chunk=1 << 18,
        train_nodes=train_nodes,
        rollout_nodes=rollout_nodes,
    )
    steps = make_schedule(plan, num_senders + 1, 1 << 23)
    assert time.perf_counter() - start < 10
    assert all(leg.numel <= 1 << 23 for step in steps for leg in (step.send, step.receive) if leg)
    moved, num_receivers = moved_numel(plan), rollout_tp * num_replicas
    sent, fetched = Counter(), Counter()
    for (phase, source, dest), count in moved.items():
        if phase == 0:
            sent[source] += count
            fetched[dest] += count
    total = model_numel(tensors)
    assert sum(sent.values()) == sum(fetched.values()) == total
    # Embedding and head make the outer stages larger; what is left is the size of a chunk.
    assert max(sent.values()) < 1.06 * total / num_senders
    assert max(fetched.values()) < 1.03 * total / num_receivers


def test_rounds_have_one_sender_and_one_receiver_each_and_are_few() -> None:
    """All with all: rounds are distances. Sparse: at most twice what the busiest rank needs."""
    shape = ModelShape(2, 8, 4, 4, 2, 8, 64, tied=False)
    plan, _, _ = plan_of(shape, "LlamaForCausalLM", TrainGrid(8, 2, 2), StagePlan(2, 2), 2, 3)
    taken = Counter()
    for (phase, source, dest), number in plan.rounds.items():
        taken["from", phase, source, number] += 1
        taken["to", phase, dest, number] += 1
    assert set(taken.values()) == {1}
    busiest = Counter((way, phase, member) for way, phase, member, _ in taken)
    for phase in {phase for phase, _, _ in plan.rounds}:
        most = max(count for (_, at, _), count in busiest.items() if at == phase)
        assert max(number for (at, _, _), number in plan.rounds.items() if at == phase) < 2 * most - 1


def test_ends_that_do_not_fit_are_refused() -> None:
    """A sender that wants, a receiver that holds, two layouts, a stage that nobody holds."""
    specs = param_map(FAMILIES["LlamaForCausalLM"], ModelShape(2, 8, 4, 4, 2, 8, 64, tied=False))
    senders, receivers = transfer_ends(TrainGrid(2, 1, 2), specs, StagePlan(2, 2), 1, 2)
    tensors = tensors_of(specs)
    with pytest.raises(ValueError, match="training rank 0 of a weight transfer asks for a rollout shard"):
        make_transfer_plan(tensors, [replace(senders[0], wanted=receivers[0].wanted), senders[1]], receivers)
    with pytest.raises(ValueError, match="rollout rank 1 of a weight transfer must ask for a shard and have none"):
        make_transfer_plan(tensors, senders, [receivers[0], replace(receivers[1], held=senders[0].held)])
    other = replace(receivers[1], wanted=receivers[1].wanted._replace(tp_size=2))
    with pytest.raises(ValueError, match="share one layout"):
        make_transfer_plan(tensors, senders, [receivers[0], other])
    with pytest.raises(ValueError, match="no training rank holds lm_head.weight"):
        make_transfer_plan(tensors, senders[:1], receivers)
