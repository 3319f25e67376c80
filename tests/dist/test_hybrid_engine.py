"""Entering and leaving rollout mode on real engines: one memory, the right tokens, nothing stale, nothing left over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from rollout_checks import GREEDY, RANDOM, hugging_face_greedy, logprob_difference, round_trip, tokens
from tiny_models import run_config, save_llama, save_qwen2

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


def memory_facts(worker) -> dict:
    """Which storage each rollout parameter lies in, and what is held outside generation."""
    own = worker.roles["actor"].trainable.param_buffers[0].param_data.untyped_storage()
    foreign = worker.roles["rollout"].engine.weights.foreign
    held_outside = (
        foreign.is_allocated and foreign.num_bytes > 0,
        worker.roles["rollout"].generator.kv_cache.num_bytes,
    )
    worker.roles["rollout"].enter()
    places = {own.data_ptr(): "own", foreign.data.untyped_storage().data_ptr(): "foreign"}
    rollout = {
        name: places.get(p.untyped_storage().data_ptr(), "elsewhere")
        for name, p in worker.roles["rollout"].generator.model.named_parameters()
    }
    trainer_pointers = {p.data_ptr() for p in worker.roles["actor"].trainable.models[0].parameters()}
    shared = {
        name
        for name, p in worker.roles["rollout"].generator.model.named_parameters()
        if p.data_ptr() in trainer_pointers
    }
    worker.roles["rollout"].exit()
    return {"places": rollout, "shared": shared, "held_outside": held_outside}


def rollout_rank(config) -> dict:
    """Everything the tests below look at, from one build of the engines."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    torch.manual_seed(5)
    expected_draw = torch.rand(3)
    torch.manual_seed(5)
    greedy, report = round_trip(worker, GREEDY)
    result = {
        "stage": worker.groups.pp_rank,
        "training_rng_untouched": torch.equal(torch.rand(3), expected_draw),
        "greedy": tokens(greedy),
        "report": report,
        "memory": memory_facts(worker),
    }
    sampled, _ = round_trip(worker, RANDOM)
    result["sampled"] = tokens(sampled)
    result["difference"] = logprob_difference(worker, sampled)
    weight = worker.roles["actor"].trainable.param_buffers[0].param_data
    before = weight.clone()
    weight.mul_(1.25)
    changed, _ = round_trip(worker, GREEDY)
    result["greedy_after_change"] = tokens(changed)
    result["difference_after_change"] = logprob_difference(worker, changed)
    weight.copy_(before)
    for _ in range(3):
        again, _ = round_trip(worker, GREEDY)
    result["greedy_restored"] = tokens(again)
    result["weights_unchanged"] = torch.equal(weight, before)
    return result


@pytest.fixture(
    scope="module",
    params=[save_qwen2, pytest.param(save_llama, marks=pytest.mark.exhaustive)],
    ids=["tied-qwen2", "untied-llama"],
)
def pipeline_run(request, tmp_path_factory) -> tuple[str, list[dict]]:
    path = request.param(tmp_path_factory.mktemp("model"))
    return path, run_ranks(4, rollout_rank, run_config(path, 2, 2))


def test_greedy_tokens_equal_hugging_face(pipeline_run) -> None:
    """TP2xPP2; would not catch an error that leaves every argmax in place (the log-prob test does)."""
    path, ranks = pipeline_run
    expected = hugging_face_greedy(path)
    for rank in ranks:
        assert rank["greedy"] == expected
        assert rank["greedy_restored"] == expected


def test_rollout_parameters_are_the_trainers_memory(pipeline_run) -> None:
    """Own stage: the very storage of Megatron's flat buffer; would not catch a copy made inside a kernel."""
    _, ranks = pipeline_run
    for rank in ranks:
        places = rank["memory"]["places"]
        own = {name for name, place in places.items() if place == "own"}
        assert "elsewhere" not in places.values()
        assert own == rank["memory"]["shared"]
        layers = (
            ("model.layers.0.", "model.layers.1.") if rank["stage"] == 0 else ("model.layers.2.", "model.layers.3.")
        )
        assert {name for name in own if ".layers." in name} == {name for name in places if name.startswith(layers)}
        edge = "model.embed_tokens.weight" if rank["stage"] == 0 else "model.norm.weight"
        assert edge in own


def test_nothing_is_held_outside_generation(pipeline_run) -> None:
    """Foreign stages and KV cache take no memory in train mode; would not catch memory vLLM keeps elsewhere."""
    _, ranks = pipeline_run
    assert [rank["memory"]["held_outside"] for rank in ranks] == [(False, 0)] * 4


def test_received_bytes_equal_the_lower_bound(pipeline_run) -> None:
    """Counted where tensors are received; would not catch padding inside the collective library."""
    path, ranks = pipeline_run
    for rank in ranks:
        report = rank["report"]
        assert report.bytes_received == report.lower_bound_bytes > 0
    # Per TP2 rank: 2 of 4 query heads and 1 of 2 key/value heads of size 32, hidden 128, 96 of 192 MLP columns.
    attention = 64 * 128 + 2 * 32 * 128 + 128 * 64
    mlp, norms = 3 * 96 * 128, 2 * 128
    tied = "qwen2" in Path(path, "config.json").read_text()
    bias = 64 + 32 + 32 if tied else 0
    two_layers = 2 * (attention + mlp + norms + bias)
    # 70 tokens on 128 rows: the second rank's shard of a vocabulary has 6 that are not padding.
    vocabulary = [0, 0] if tied else [64 * 128, 6 * 128]
    first_stage_lacks = [two_layers + 128 + rows for rows in vocabulary]
    last_stage_lacks = [two_layers + rows for rows in vocabulary]
    assert [rank["report"].bytes_received for rank in ranks] == [4 * n for n in first_stage_lacks + last_stage_lacks]


def test_rollout_and_trainer_agree_on_samples(pipeline_run) -> None:
    """fp32 5e-5, at temperature 1; would not catch an error both engines share."""
    _, ranks = pipeline_run
    differences = [rank["difference"] for rank in ranks if rank["stage"] == 1]
    assert len(differences) == 2 and max(differences) < 5e-5
    assert all(rank["sampled"] == ranks[0]["sampled"] for rank in ranks)


def test_changed_weights_are_seen_by_the_next_generation(pipeline_run) -> None:
    """All stages, and no stale prefix block; would not catch a change in rows that no prompt touches."""
    _, ranks = pipeline_run
    for rank in ranks:
        assert rank["greedy_after_change"] != rank["greedy"]
    assert max(rank["difference_after_change"] for rank in ranks if rank["stage"] == 1) < 5e-5


def test_training_state_survives_generation(pipeline_run) -> None:
    """RNG and weights after several round trips; would not catch optimizer state being touched."""
    _, ranks = pipeline_run
    assert all(rank["training_rng_untouched"] and rank["weights_unchanged"] for rank in ranks)


def test_one_process_samples_the_same_tokens(pipeline_run) -> None:
    """Seeds do not depend on the layout; would not catch layouts that differ only at near-ties."""
    path, ranks = pipeline_run
    alone = run_ranks(1, rollout_rank, run_config(path, 1, 1))[0]
    assert alone["sampled"] == ranks[0]["sampled"]
    assert alone["report"].bytes_received == alone["report"].lower_bound_bytes == 0
