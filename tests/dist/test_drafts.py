"""Answers that are drawn with drafts, on real engines, beside those that are drawn without: the same tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from draft_checks import (
    ROLLOUT,
    counts_of,
    drafts,
    every_way,
    many_answers,
    must_be_equal,
    must_be_equal_but_for_ties,
)
from folder_rows import DENSE, WITH_EXPERTS
from ranks import run_ranks
from sweeps import WEEKLY
from tiny_gpt_oss import save_gpt_oss
from tiny_models import run_config, save_deepseek_v2, save_gemma3, save_llama
from tiny_qwen3_5 import save_qwen3_5, save_qwen3_5_moe, save_qwen3_next

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

WAYS = ("ngram", "earlier")


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


REFUSED = (save_qwen3_5, save_qwen3_5_moe, save_qwen3_next)
SWEPT = (save_gpt_oss, save_deepseek_v2)
FAMILIES = [
    pytest.param(save, marks=[pytest.mark.exhaustive] if save in SWEPT else WEEKLY, id=save.__name__)
    for save in (*DENSE, *WITH_EXPERTS)
    if save not in REFUSED
]


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
