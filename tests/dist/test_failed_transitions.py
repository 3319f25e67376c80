"""Transitions that go wrong on real engines: a flipped bit, a failing engine, memory that was sent away."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from rollout_checks import GREEDY, round_trip, tokens, weights
from tiny_models import random_batch, run_config, save_llama, save_qwen2

from megatron_rl.columns import ACTOR_UPDATE, CRITIC_UPDATE, SCORING

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]

MEGATRON = "actor_rollout_ref__actor__megatron__"
ROLLOUT = "actor_rollout_ref__rollout__"


def build(config, *others: str):
    """The rollout after all roles whose memory may rest."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    for role in ("actor", *others, "rollout"):
        worker.build(role)
    return worker


def flip_one_bit_on_rank_zero(worker) -> None:
    """The next message that rank 0 receives loses its first element's lowest bit."""
    transport = worker.roles["rollout"].engine.weights.transport
    finish = transport.finish

    def finish_with_a_flip(works, receive):
        finish(works, receive)
        if receive is not None and worker.groups.rank == 0:
            receive[0].view(torch.int32).view(-1)[0] ^= 1
            transport.finish = finish

    transport.finish = finish_with_a_flip


def flipped_bit_rank(config) -> dict:
    from megatron_rl.hybrid_engine.verify import WeightMismatchError

    worker = build(config)
    before = weights(worker)
    flip_one_bit_on_rank_zero(worker)
    with pytest.raises(WeightMismatchError) as raised:
        worker.roles["rollout"].enter()
    result = {
        "message": str(raised.value),
        "in_rollout": worker.roles["rollout"].engine.in_rollout,
        "kv_bytes": worker.roles["rollout"].generator.kv_cache.num_bytes,
        "foreign": worker.roles["rollout"].engine.weights.foreign.is_allocated,
        "intact": all(map(torch.equal, weights(worker), before)),
    }
    greedy, report = round_trip(worker, GREEDY)
    return result | {"greedy": tokens(greedy), "verify_seconds": report.verify_seconds}


def test_a_flipped_bit_stops_every_rank_before_generation(tmp_path) -> None:
    """Tensor, rank and interval are named; train mode with intact weights. Would not catch a flip after checking."""
    path = save_llama(tmp_path / "model", num_key_value_heads=4)
    ranks = run_ranks(4, flipped_bit_rank, run_config(path, 4, 1, **{f"{ROLLOUT}tensor_model_parallel_size": 2}))
    for rank in ranks:
        assert not rank["in_rollout"] and not rank["foreign"] and rank["kv_bytes"] == 0 and rank["intact"]
        assert rank["greedy"] == ranks[0]["greedy"] and rank["verify_seconds"] > 0
    # The head is the first tensor of Megatron's buffer; rank 1 holds rows 32 to 64 of its 70.
    expected = (
        "rank 0: lm_head.weight, segment rows, elements [32, 64) x [0, 128) differ from those of rank 1, "
        "their owner (1 of"
    )
    assert ranks[0]["message"].startswith(expected)
    assert all("wrong on rank(s) [0]" in rank["message"] for rank in ranks[1:])


def failing_engine_rank(config) -> dict:
    """vLLM fails to wake, later to sleep; the training copy is dropped meanwhile, everything else sent away."""
    worker = build(config)
    rows = random_batch(8)
    rows.add(old_log_probs=rows["rollout_log_probs"])
    worker.roles["actor"].update(rows.read_by(ACTOR_UPDATE))
    before = weights(worker)
    moments = [tensor.clone() for tensor in worker.roles["actor"].trainable.optimizer_state()]
    expected = tokens(round_trip(worker, GREEDY)[0])
    result = {"num_moments": len(moments)}

    def fail() -> None:
        held = [
            buffer.param_data.untyped_storage().nbytes() for buffer in worker.roles["actor"].trainable.param_buffers
        ]
        held += [
            buffer.grad_data.untyped_storage().nbytes() for buffer in worker.roles["actor"].trainable.param_buffers
        ]
        held += [tensor.untyped_storage().nbytes() for tensor in worker.roles["actor"].trainable.optimizer_state()]
        result["held_in_rollout"] = sum(held)
        raise OSError("no cache today")

    rollout = worker.roles["rollout"]
    for method, failing in (("enter", "wake"), ("exit", "sleep")):
        original = getattr(rollout.generator, failing)
        setattr(rollout.generator, failing, fail)
        if method == "exit":
            rollout.enter()
        with pytest.raises(OSError, match="no cache today"):
            getattr(rollout, method)()
        setattr(rollout.generator, failing, original)
        result[method] = not worker.roles["rollout"].engine.in_rollout and all(
            map(torch.equal, weights(worker), before)
        )
        worker.roles["rollout"].generator.sleep()
    result["moments_equal"] = all(map(torch.equal, worker.roles["actor"].trainable.optimizer_state(), moments))
    result["same_tokens"] = tokens(round_trip(worker, GREEDY)[0]) == expected
    return result


def test_a_failing_engine_leaves_train_mode_with_everything_restored(tmp_path) -> None:
    """Dropped weights, gradients and moments are back. Would not catch a rank that fails alone and is waited for."""
    path = save_qwen2(tmp_path / "model")
    options = {
        f"{ROLLOUT}tensor_model_parallel_size": 1,
        f"{ROLLOUT}drop_train_weights": True,
        f"{MEGATRON}grad_offload": True,
        f"{MEGATRON}optimizer_offload": True,
    }
    for rank in run_ranks(2, failing_engine_rank, run_config(path, 2, 1, **options)):
        assert rank["enter"] and rank["exit"] and rank["moments_equal"] and rank["same_tokens"]
        assert rank["num_moments"] > 0 and rank["held_in_rollout"] == 0


def resting_rank(config, num_rounds: int) -> dict:
    """Critic and actor train with generation in between; all their memory rests meanwhile."""
    worker = build(config, "critic", "reference")
    held = []
    for _ in range(num_rounds):
        rows = random_batch(8)
        rows.add(old_log_probs=rows["rollout_log_probs"])
        worker.roles["critic"].update(rows.read_by(CRITIC_UPDATE))
        worker.roles["actor"].update(rows.read_by(ACTOR_UPDATE))
        worker.roles["rollout"].enter()
        critic, reference = worker.roles["critic"].trainable, worker.roles["reference"].model.pipeline.parameters()
        tensors = [*critic.pipeline.parameters(), *critic.optimizer_state(), *reference]
        tensors += [buffer.grad_data for buffer in critic.param_buffers]
        held.append(sum(tensor.untyped_storage().nbytes() for tensor in tensors))
        worker.roles["rollout"].exit()
    scores = worker.roles["reference"].log_probs(random_batch(8).read_by(SCORING))
    return {
        "held": held,
        "weights": [
            p.detach().clone()
            for m in (worker.roles["actor"], worker.roles["critic"])
            for p in m.trainable.pipeline.parameters()
        ],
        "reference": scores.flat("ref_log_probs"),
    }


def test_offloaded_roles_train_as_if_they_had_stayed(tmp_path) -> None:
    """Bit-equal weights after two rounds, nothing held meanwhile. Would not catch slow copies."""
    path = save_qwen2(tmp_path / "model")
    keys = ("param_offload", "grad_offload", "optimizer_offload")
    options = {f"critic__megatron__{key}": True for key in keys}
    options |= {f"{MEGATRON}{key}": True for key in keys[1:]} | {
        "actor_rollout_ref__ref__megatron__param_offload": True
    }
    (stayed,) = run_ranks(1, resting_rank, run_config(path, 1, 1), 2)
    (rested,) = run_ranks(1, resting_rank, run_config(path, 1, 1, **options), 2)
    assert rested["held"] == [0, 0] and min(stayed["held"]) > 0
    assert all(map(torch.equal, rested["weights"], stayed["weights"]))
    assert torch.equal(rested["reference"], stayed["reference"])
