"""Answers that are drawn with drafts, on real engines, beside those that are drawn without: the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from folder_rows import DENSE, WITH_EXPERTS
from ranks import run_ranks
from sliced_checks import in_slices, largest_difference, model_at, starts
from sweeps import WEEKLY
from tiny_gpt_oss import save_gpt_oss
from tiny_models import run_config, save_deepseek_v2, save_gemma3, save_llama
from tiny_qwen3_5 import save_qwen3_5, save_qwen3_5_moe, save_qwen3_next

from megatron_rl.records import Sampling
from megatron_rl.rollout.slices import DraftCounts, Drawn, Slice, Start

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

ROLLOUT = "actor_rollout_ref__rollout__"
WAYS = ("ngram", "earlier")
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


def test_drafts_change_no_answer(tmp_path) -> None:
    """Greedy, sampled and filtered, in whole and in slices, together and alone: a model of windows that repeats itself.
    With drafts it takes at least 1.3 times fewer steps, also where tokens are drawn at random, and fewer than half
    where half of an earlier answer comes again. (Without `drafts_keep_samples`, what is drawn at random differs.)

    Would not catch what many prompts show: the sweeps draw a thousand of every family.
    """
    path = save_gemma3(tmp_path)
    [plain] = run_ranks(1, every_way, run_config(path, 1, 1), timeout=120)
    for way, fewer in zip(WAYS, (1.3, 2.0), strict=True):
        earlier = plain if way == "earlier" else None
        [drafted] = run_ranks(1, every_way, run_config(path, 1, 1, **drafts(way)), earlier, timeout=120)
        for name, answers in drafted.items():
            must_be_equal(answers, plain[name.split(" ")[0]])
        for name in ("greedy", "greedy alone", "warm"):
            counts = counts_of(drafted[name])
            print(way, name, counts)
            assert counts.num_tokens >= fewer * counts.num_steps
            assert counts.num_tokens - counts.num_steps <= counts.num_drafted
    assert all(answer.drafts is None for answers in plain.values() for answer in answers.values())


CASES = {
    "prompts in parts": (1, 1, {f"{ROLLOUT}max_num_batched_tokens": 40, f"{ROLLOUT}max_num_seqs": 2}),
    "few rows": (1, 1, {f"{ROLLOUT}speculative_disable_by_batch_size": 1}),
    "long drafts": (1, 1, {f"{ROLLOUT}num_speculative_tokens": 20}),
    "adapters": (1, 1, {"actor_rollout_ref__model__lora__rank": 8}),
    "TP2": (2, 2, {}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_drafts_with_other_features(tmp_path, case) -> None:
    """Answers are those without drafts where a draft is cut by the tokens of a step or by the end of an answer, where
    drafts come and go with the number of requests, with adapters and on two ranks.

    Would not catch adapters whose products are wrong: `test_adapter_parity.py` does.
    """
    num_ranks, tp_size, options = CASES[case]
    path = save_gemma3(tmp_path)
    plain = run_ranks(num_ranks, every_way, run_config(path, tp_size, 1, **options), timeout=200)
    for way in WAYS:
        config, earlier = run_config(path, tp_size, 1, **drafts(way), **options), plain[0] if way == "earlier" else None
        drafted = run_ranks(num_ranks, every_way, config, earlier, timeout=200)
        for name, answers in drafted[0].items():
            must_be_equal(answers, plain[0][name])
        if case == "few rows":
            assert counts_of(drafted[0]["greedy"]).num_drafted < counts_of(drafted[0]["greedy alone"]).num_drafted


@pytest.mark.exhaustive
def test_drafts_in_eight_bits(tmp_path) -> None:
    """Weights of 8 bits draw the same answers with drafts as without.

    Would not catch other codes: `test_eight_bit_rollouts.py` does.
    """
    path, eight = save_llama(tmp_path), {f"{ROLLOUT}quantization": "fp8", f"{ROLLOUT}quantization_block_size": 32}
    [plain] = run_ranks(1, every_way, run_config(path, 1, 1, **eight), timeout=200)
    for way in WAYS:
        config, earlier = run_config(path, 1, 1, **drafts(way), **eight), plain if way == "earlier" else None
        [drafted] = run_ranks(1, every_way, config, earlier, timeout=200)
        for name, answers in drafted.items():
            must_be_equal(answers, plain[name])


NUM_PROMPTS = 1000
REFUSED = (save_qwen3_5, save_qwen3_5_moe, save_qwen3_next)
SWEPT = (save_llama, save_gemma3, save_gpt_oss, save_deepseek_v2)
FAMILIES = [
    pytest.param(save, marks=[pytest.mark.exhaustive] if save in SWEPT else WEEKLY, id=save.__name__)
    for save in (*DENSE, *WITH_EXPERTS)
    if save not in REFUSED
]


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


@pytest.mark.parametrize("save", FAMILIES)
def test_greedy_answers_of_a_thousand_prompts(tmp_path, save: Callable) -> None:
    """Greedy answers with drafts are those without, token by token, unless two tokens tie.

    Would not catch what answers of more than 24 tokens show.
    """
    path = save(tmp_path)
    [(plain, num_plain)] = run_ranks(1, many_answers, run_config(path, 1, 1), timeout=280)
    for way in WAYS:
        config, earlier = run_config(path, 1, 1, **drafts(way)), plain if way == "earlier" else None
        [(drafted, num_drafted)] = run_ranks(1, many_answers, config, earlier, timeout=280)
        num_ties = must_be_equal_but_for_ties(path, drafted, plain)
        counts = counts_of(drafted)
        print(f"{save.__name__}, {way}: {num_plain} and {num_drafted} steps, {num_ties} ties, {counts}")
        assert counts.num_steps < counts.num_tokens and num_drafted <= num_plain
