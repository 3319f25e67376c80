"""Entering and leaving rollout mode on real engines: one memory, the right tokens, nothing stale, nothing left over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from tiny_models import run_config, save_llama, save_qwen2

from megatron_rl.records import Generations, Prompts, Sampling, non_tensor, ragged

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=12, salt=0)
RANDOM = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=12, salt=3)
# The last prompt fills a whole block of the prefix cache (128 tokens), so stale blocks would be found.
PROMPT_LENGTHS = (3, 9, 17, 150)


def prompts() -> Prompts:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(2, 70, (length,), generator=generator) for length in PROMPT_LENGTHS]
    count = len(rows)
    return Prompts(
        index=torch.arange(count),
        sample=torch.zeros(count, dtype=torch.int64),
        prompt_ids=ragged(rows),
        data_source=non_tensor(["test"] * count),
        ground_truth=non_tensor([""] * count),
        extra_info=non_tensor([{}] * count),
        batch_size=[count],
    )


def tokens(generations: Generations) -> list[list[int]]:
    return [row.tolist() for row in generations.response_ids.unbind()]


def logprob_difference(worker, generations: Generations) -> float | None:
    """Largest |vLLM - trainer| over the sampled tokens; None before the last stage."""
    from megatron_rl.experience.assemble import assemble

    scores = worker.compute_log_probs(assemble(prompts(), generations).sequences())
    if scores is None:
        return None
    return float((scores.scores.values() - generations.rollout_log_probs.values()).abs().max())


def round_trip(worker, sampling: Sampling) -> tuple[Generations, object]:
    report = worker.enter_rollout()
    generations = worker.generate(prompts(), sampling)
    worker.exit_rollout()
    return generations, report


def memory_facts(worker) -> dict:
    """Which storage each rollout parameter lies in, and what is held outside generation."""
    own = worker.actor.trainable.param_buffers[0].param_data.untyped_storage()
    foreign = worker.engine.weights.foreign
    held_outside = (foreign.is_allocated and foreign.num_bytes > 0, worker.rollout.kv_cache.num_bytes)
    worker.enter_rollout()
    places = {own.data_ptr(): "own", foreign.data.untyped_storage().data_ptr(): "foreign"}
    rollout = {
        name: places.get(p.untyped_storage().data_ptr(), "elsewhere") for name, p in worker.rollout.model.named_parameters()
    }
    trainer_pointers = {p.data_ptr() for p in worker.actor.trainable.models[0].parameters()}
    shared = {name for name, p in worker.rollout.model.named_parameters() if p.data_ptr() in trainer_pointers}
    worker.exit_rollout()
    return {"places": rollout, "shared": shared, "held_outside": held_outside}


def rollout_rank(config) -> dict:
    """Everything the tests below look at, from one build of the engines."""
    from megatron_rl.workers.rank_worker import RankWorker

    worker = RankWorker(config)
    worker.build_actor()
    worker.build_rollout()
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
    weight = worker.actor.trainable.param_buffers[0].param_data
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


def hugging_face_greedy(path: str) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    answers = []
    for row in prompts().prompt_ids.unbind():
        ids = row.tolist()
        for _ in range(GREEDY.max_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == 1:
                break
        answers.append(ids[len(row) :])
    return answers


@pytest.fixture(scope="module", params=[save_qwen2, save_llama], ids=["tied-qwen2", "untied-llama"])
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
        layers = ("model.layers.0.", "model.layers.1.") if rank["stage"] == 0 else ("model.layers.2.", "model.layers.3.")
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
    vocabulary = 64 * 128
    two_layers = 2 * (attention + mlp + norms + bias)
    first_stage_lacks = two_layers + 128 + (0 if tied else vocabulary)
    last_stage_lacks = two_layers + (0 if tied else vocabulary)
    assert [rank["report"].bytes_received for rank in ranks] == [4 * first_stage_lacks] * 2 + [4 * last_stage_lacks] * 2


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
