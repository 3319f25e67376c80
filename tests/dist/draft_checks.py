"""Answers with draft tokens beside those without, on real engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from sliced_checks import in_slices, largest_difference, model_at, starts

from megatron_rl.records import Sampling
from megatron_rl.rollout.slices import DraftCounts, Drawn, Slice, Start

ROLLOUT = "actor_rollout_ref__rollout__"
GREEDY = Sampling(0.0, 1.0, -1, 24, 0)
ASKED = {"greedy": GREEDY, "warm": Sampling(0.7, 1.0, -1, 24, 3), "filtered": Sampling(1.0, 0.9, 12, 24, 5)}
BOUND, TIE = 5e-5, 1e-5
Answers = dict[int, Drawn]


def drafts(way: str) -> dict[str, object]:
    return {f"{ROLLOUT}speculative": way, f"{ROLLOUT}prompt_lookup_min": 1}


def engine_of(config):
    from megatron_rl.roles.host import RankHost

    host = RankHost(config)
    host.build("actor")
    for name, parameter in host.roles["actor"].trained.parameters.items():
        if name.endswith("lora_B"):  # new adapters would add nothing
            torch.nn.init.normal_(parameter.data, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    host.build("rollout")
    host.roles["rollout"].enter()
    return host.roles["rollout"].generator


def naming(first: tuple[Start, ...], answers: Answers | None) -> tuple[Start, ...]:
    """The requests, each with an earlier answer that goes wrong after half of its tokens, and that of another one."""
    if answers is None:
        return first
    named = []
    for start, other in zip(first, (*first[1:], first[0]), strict=True):
        mine, others = answers[start.request].token_ids, answers[other.request].token_ids
        half = len(mine) // 2
        texts = ((*start.token_ids[-4:], *mine[:half], 2, *mine[half + 1 :]), (*other.token_ids[-4:], *others))
        named.append(replace(start, earlier=tuple(np.array(text, dtype=np.int32).tobytes() for text in texts)))
    return tuple(named)


def every_way(config, earlier: Mapping[str, Answers] | None = None) -> dict[str, Answers]:
    """Answers to each kind of sampling: of all requests together, in slices of three steps, and of each alone.

    earlier: those that requests name, by the kind of sampling.
    """
    generator, answers = engine_of(config), {}
    for name, sampling in ASKED.items():
        first = naming(starts(config.trainer.seed, sampling), None if earlier is None else earlier[name])
        answers[name] = in_slices(generator, first, None)
        answers[f"{name} in slices"] = in_slices(generator, first, 3)
        answers[f"{name} alone"] = {
            start.request: in_slices(generator, (start,), None)[start.request] for start in reversed(first)
        }
    return answers


def must_be_equal(drafted: Answers, plain: Answers) -> None:
    """Tokens and ends; log-probs up to rounding."""
    assert drafted.keys() == plain.keys()
    for request, answer in plain.items():
        assert (drafted[request].token_ids, drafted[request].finish) == (answer.token_ids, answer.finish), request
        assert largest_difference(drafted[request].log_probs, answer.log_probs) < BOUND


def counts_of(answers: Answers) -> DraftCounts:
    total = DraftCounts()
    for answer in answers.values():
        assert answer.drafts is not None and answer.drafts.num_tokens == len(answer.token_ids)
        total = total.plus(answer.drafts)
    return total


NUM_PROMPTS = 1000


def many_starts() -> tuple[Start, ...]:
    """A thousand prompts of 3 to 60 tokens, half of which say something twice."""
    draw = torch.Generator().manual_seed(11)
    prompts = []
    for number in range(NUM_PROMPTS):
        length = int(torch.randint(3, 31, (), generator=draw))
        prompts.append(torch.randint(2, 70, (length,), generator=draw).tolist() * (1 + number % 2))
    return tuple(Start(n, tuple(ids), n, GREEDY.max_tokens, GREEDY) for n, ids in enumerate(prompts))


def many_answers(config, earlier: Answers | None = None) -> tuple[Answers, int]:
    """The answers, and the engine's steps. earlier: those that requests name."""
    return engine_of(config).advance(Slice(0, None, naming(many_starts(), earlier)))


@torch.no_grad()
def is_tie(path: str, prompt: tuple[int, ...], answer: tuple[int, ...]) -> bool:
    """Whether the two best tokens after an answer's beginning are as good as equal."""
    best = model_at(path)(torch.tensor([[*prompt, *answer]])).logits[0, -1].topk(2).values
    return float(best[0] - best[1]) < TIE


def must_be_equal_but_for_ties(path: str, drafted: Answers, plain: Answers) -> int:
    """Returns how many answers differ, all of them where two tokens tie."""
    others = [start for start in many_starts() if plain[start.request].token_ids != drafted[start.request].token_ids]
    for start in others:
        pair = zip(plain[start.request].token_ids, drafted[start.request].token_ids, strict=False)
        same = next(place for place, (one_way, other) in enumerate(pair) if one_way != other)
        assert is_tie(path, start.token_ids, plain[start.request].token_ids[:same]), (start.request, same)
    return len(others)
