"""What tests of generation in slices share: requests, slices of equal length, forwards by transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache

import torch
from rollout_checks import RANDOM, prompts

from megatron_rl.records import Sampling
from megatron_rl.rollout.seeds import request_seed
from megatron_rl.rollout.slices import DraftCounts, Drawn, Slice, Start

SAMPLED = dataclasses.replace(RANDOM, max_tokens=20)


def starts(run_seed: int, sampling: Sampling = SAMPLED) -> tuple[Start, ...]:
    """The rows of `prompts()`, each with the seed that `generate` gives it; their numbers are 100, 101, ..."""
    asked = prompts()
    return tuple(
        Start(
            100 + row,
            tuple(ids.tolist()),
            request_seed(run_seed, sampling.salt, int(asked["index"][row]), int(asked["sample"][row])),
            sampling.max_tokens,
            sampling,
        )
        for row, ids in enumerate(asked["input_ids"].unbind())
    )


def resumed(start: Start, drawn: Drawn, seed: int) -> Start:
    """The request with what was drawn at the end of its prompt."""
    left = start.max_tokens - len(drawn.token_ids)
    return dataclasses.replace(start, token_ids=start.token_ids + drawn.token_ids, seed=seed, max_tokens=left)


def joined(parts: Sequence[dict[int, Drawn]]) -> dict[int, Drawn]:
    """What several slices drew, one after the other."""
    whole: dict[int, Drawn] = {}
    for part in parts:
        for request, new in part.items():
            old = whole.get(request, Drawn((), ()))
            assert not old.finish
            drafts = None if new.drafts is None else (old.drafts or DraftCounts()).plus(new.drafts)
            tokens, log_probs = old.token_ids + new.token_ids, old.log_probs + new.log_probs
            whole[request] = Drawn(tokens, log_probs, new.finish, drafts=drafts)
    return whole


def in_slices(generator, first: Sequence[Start], num_steps: int | None, version: int = 0) -> dict[int, Drawn]:
    """All requests started at once, then slices of equal length until all are finished."""
    parts = [generator.advance(Slice(version, num_steps, tuple(first)))[0]]
    while generator.requests.unfinished:
        drawn, taken = generator.advance(Slice(version, num_steps))
        assert 0 < taken <= num_steps
        parts.append(drawn)
    return joined(parts)


def nudge(parameters: Sequence[torch.Tensor], seed: int, scale: float = 0.02) -> None:
    """Other weights in the same memory."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(scale * torch.randn(parameter.shape, generator=noise))


@cache
def model_at(folder: str):
    """transformers' model of a folder, in fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def plain_log_probs(folder: str, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """The log-prob of each token of an answer, by one forward."""
    ids = torch.tensor([[*prompt, *answer]])
    table = torch.log_softmax(model_at(folder)(ids).logits[0].float(), -1)
    return [float(table[len(prompt) - 1 + at, token]) for at, token in enumerate(answer)]


@torch.no_grad()
def kept_log_probs(before: str, after: str, prompt: Sequence[int], answer: Sequence[int], num_old: int) -> list[float]:
    """The same for the tokens after the first `num_old`, by `after` on keys and values that `before` made."""
    ids = torch.tensor([[*prompt, *answer]])
    cut = len(prompt) + num_old - 1  # the token drawn last had not been an input yet
    past = model_at(before)(ids[:, :cut], use_cache=True).past_key_values
    table = torch.log_softmax(model_at(after)(ids[:, cut:], past_key_values=past).logits[0].float(), -1)
    return [float(table[at, token]) for at, token in enumerate(answer[num_old:])]


def largest_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Of two lists of equal length; 0 where both are empty."""
    return max((abs(a - b) for a, b in zip(found, expected, strict=True)), default=0.0)
