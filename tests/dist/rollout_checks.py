"""What tests of rollout mode ask of a worker: prompts, tokens, comparisons with the trainer and with Hugging Face."""

from __future__ import annotations

from functools import partial

import torch

from megatron_rl.columns import COLUMNS, SCORING
from megatron_rl.records import Batch, Sampling, ragged

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=12, salt=0)
RANDOM = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=12, salt=3)
# The last prompt fills a whole block of the prefix cache (128 tokens), so stale blocks would be found.
PROMPT_LENGTHS = (3, 9, 17, 150)
EOS = 1


def prompts() -> Batch:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(2, 70, (length,), generator=generator) for length in PROMPT_LENGTHS]
    count = len(rows)
    return Batch(
        index=torch.arange(count),
        sample=torch.zeros(count, dtype=torch.int64),
        input_ids=ragged(rows),
        data_source=["test"] * count,
        ground_truth=[""] * count,
        extra_info=[{}] * count,
        uid=torch.arange(count),
    )


def ask(rollout, asked: Batch, sampling: Sampling, seed: int = 1) -> Batch:
    """The answers of one rank's replica, in rollout mode, by one slice with the weights that it has."""
    from megatron_rl.rollout.seeds import request_seed
    from megatron_rl.rollout.slices import Slice
    from megatron_rl.sampling.unscheduled_requests import UnscheduledRequests

    questions = UnscheduledRequests(asked, sampling, partial(request_seed, seed), None)
    (share,) = questions.shares(1)
    report = rollout.advance({rollout.replica: Slice(max(rollout._version, 0), None, share)})
    questions.note(rollout.generator.requests.groups.all(report)[:1])  # only the first TP group has all of it
    return questions.rows()


def tokens(answers: Batch) -> list[list[int]]:
    return [row.tolist() for row in answers.sampled_ids.unbind()]


def weights(worker) -> list[torch.Tensor]:
    """A copy of the actor's own parameters."""
    return [p.detach().clone() for p in worker.roles["actor"].trainable.pipeline.parameters()]


def logprob_difference(worker, answers: Batch) -> float | None:
    """Largest |vLLM - trainer| over the sampled tokens; None before the last stage."""
    scores = worker.roles["actor"].log_probs(answers.select(*COLUMNS.read_by(SCORING), "policy_features"))
    if scores is None:
        return None
    return float((scores.flat("old_log_probs") - answers.flat("rollout_log_probs")).abs().max())


def round_trip(worker, sampling: Sampling) -> tuple[Batch, object]:
    report = worker.roles["rollout"].enter()
    answers = ask(worker.roles["rollout"], prompts(), sampling)
    worker.roles["rollout"].exit()
    return answers, report


def addresses(worker) -> dict[str, int]:
    """Where vLLM's parameters and its KV cache lie, as its own modules and layers see them."""
    generator = worker.roles["rollout"].generator
    runner = generator.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    found = {name: parameter.data_ptr() for name, parameter in runner.model.named_parameters()}
    layers = runner.vllm_config.compilation_config.static_forward_context
    kept = {name: layer.kv_cache for name, layer in layers.items() if hasattr(layer, "kv_cache")}
    each = {name: cache if isinstance(cache, list | tuple) else [cache] for name, cache in kept.items()}
    caches = {f"{name} {number}": cache.data_ptr() for name, own in each.items() for number, cache in enumerate(own)}
    assert caches and 0 not in caches.values()
    return found | caches


def hugging_face_greedy(path: str) -> list[list[int]]:
    from megatron_rl.controller.report import hf_model

    return greedy_answers(hf_model(path))


@torch.no_grad()
def greedy_answers(model: torch.nn.Module) -> list[list[int]]:
    """The greedy answers of a model of transformers to `prompts`, token by token."""
    answers = []
    for row in prompts()["input_ids"].unbind():
        ids = row.tolist()
        for _ in range(GREEDY.max_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == EOS:
                break
        answers.append(ids[len(row) :])
    return answers


@torch.no_grad()
def hugging_face_log_probs(path: str, answers: list[list[int]]) -> torch.Tensor:
    """Log-probs of answers to `prompts` under a folder's model of transformers, one after the other."""
    from megatron_rl.controller.report import hf_model

    model, found = hf_model(path), []
    for row, answer in zip(prompts()["input_ids"].unbind(), answers, strict=True):
        ids = torch.tensor([[*row.tolist(), *answer]])
        log_probs = model(ids).logits[0, len(row) - 1 : -1].log_softmax(-1)
        found.append(log_probs.gather(-1, ids[0, len(row) :, None])[:, 0])
    return torch.cat(found)
