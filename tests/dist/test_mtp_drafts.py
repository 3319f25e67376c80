"""Answers that the model's own multi-token prediction layer guesses ahead, on real engines: the same tokens."""

from __future__ import annotations

import pytest
import torch
from draft_checks import (
    GREEDY,
    ROLLOUT,
    Answers,
    counts_of,
    drafts,
    every_way,
    many_answers,
    must_be_equal,
    must_be_equal_but_for_ties,
)
from ranks import run_ranks
from sliced_checks import in_slices, starts
from sweeps import marks_of
from tiny_models import run_config
from tiny_mtp import WITH_MTP, save_deepseek_with_mtp, save_glm4_with_mtp

from megatron_rl.columns import ACTOR_UPDATE
from megatron_rl.records import ragged, single_turn

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

OFTEN, SELDOM = ("GLM-4.5",), ("GLM-4.7-Flash",)
"""Weekly: latent attention, which DeepSeek-V3 has."""


@pytest.mark.parametrize("family", [pytest.param(each, marks=marks_of(each, OFTEN, SELDOM)) for each in WITH_MTP])
def test_guesses_change_no_answer(tmp_path, family) -> None:
    """Greedy, sampled and filtered, together and alone, in whole and in slices. The layer guesses that a token comes
    again, which is so in most greedy answers. Would not catch a layer that guesses badly: see below.
    """
    path = WITH_MTP[family](tmp_path)
    [plain] = run_ranks(1, every_way, run_config(path, 1, 1), timeout=120)
    [drafted] = run_ranks(1, every_way, run_config(path, 1, 1, **drafts("mtp")), timeout=120)
    for name, answers in drafted.items():
        must_be_equal(answers, plain[name.split(" ")[0]])
    counts = counts_of(drafted["greedy"])
    assert counts.num_tokens >= 1.3 * counts.num_steps
    assert counts.num_tokens - counts.num_steps <= counts.num_drafted


LORA = {
    "actor_rollout_ref__model__lora__rank": 8,
    "actor_rollout_ref__model__lora__target_modules": ["linear_qkv", "linear_proj"],
}
WHOLE_EXPERTS = {f"{ROLLOUT}expert_parallel_size": 2}
CASES = {
    "prompts in parts": (1, 1, {f"{ROLLOUT}max_num_batched_tokens": 40, f"{ROLLOUT}max_num_seqs": 2}),
    "few rows": (1, 1, {f"{ROLLOUT}speculative_disable_by_batch_size": 1}),
    "many guesses": (1, 1, {f"{ROLLOUT}num_speculative_tokens": 7}),
    "shared beginnings": (1, 1, {f"{ROLLOUT}prefix_match_unit": 4}),
    "FP8": (1, 1, {f"{ROLLOUT}quantization": "fp8", f"{ROLLOUT}quantization_block_size": 16}),
    "TP2": (2, 2, {"actor_rollout_ref__actor__megatron__sequence_parallel": True}),
    "TP2, EP2": (2, 2, WHOLE_EXPERTS | {"actor_rollout_ref__actor__megatron__sequence_parallel": True}),
    "adapters": (1, 1, LORA),
    "merged adapters": (1, 1, LORA | {"actor_rollout_ref__model__lora__merge": True}),
}


BOTH = [(save, case) for save in (save_glm4_with_mtp, save_deepseek_with_mtp) for case in CASES]
REFUSED = [(save_deepseek_with_mtp, case) for case in ("shared beginnings", "adapters")]
"""Preflight refuses shared beginnings of prompts for latent attention on CPUs, and adapters that are not merged."""
AGAIN = [pair for pair in BOTH if (pair[0] is save_glm4_with_mtp) != (pair[1] in ("shared beginnings", "TP2"))]
AGAIN += [(save_deepseek_with_mtp, case) for case in ("TP2, EP2", "prompts in parts", "few rows")]
"""Weekly: each feature with the other family, and what cuts n-gram drafts alike in test_drafts.py."""


@pytest.mark.parametrize(
    ("save", "case"), [pytest.param(*pair, marks=marks_of(pair, weekly=AGAIN)) for pair in BOTH if pair not in REFUSED]
)
def test_guesses_with_other_features(tmp_path, save, case) -> None:
    """Answers are those without drafts where guesses are cut by the tokens of a step, come and go with the number of
    requests, go on for longer than a layer has learnt, behind prompts that are shared in part, with linears in FP8, on
    two ranks, and with adapters, which the layer does not have.
    """
    num_ranks, tp_size, options = CASES[case]
    path = save(tmp_path)
    plain = run_ranks(num_ranks, every_way, run_config(path, tp_size, 1, **options), timeout=90)
    drafted = run_ranks(num_ranks, every_way, run_config(path, tp_size, 1, **options, **drafts("mtp")), timeout=90)
    for name, answers in drafted[0].items():
        must_be_equal(answers, plain[0][name])
    if case == "FP8":
        counts = counts_of(drafted[0]["greedy"])
        assert counts.num_tokens >= 1.3 * counts.num_steps
    if case == "few rows":
        assert counts_of(drafted[0]["greedy"]).num_drafted < counts_of(drafted[0]["greedy alone"]).num_drafted


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=marks_of(each, (), {*WITH_MTP} - {*OFTEN})) for each in WITH_MTP]
)
def test_greedy_answers_of_a_thousand_prompts(tmp_path, family) -> None:
    """Greedy answers are those without drafts, token by token, unless two tokens tie. Would not catch long answers."""
    path, cache = (
        WITH_MTP[family](tmp_path),
        {f"{ROLLOUT}kv_cache_memory_bytes": 128 << 20},
    )  # the layer's keys take room
    configs = (run_config(path, 1, 1, **cache, **keys) for keys in ({}, drafts("mtp")))
    [(plain, num_plain)], [(drafted, num_drafted)] = (run_ranks(1, many_answers, each, timeout=280) for each in configs)
    num_ties, counts = must_be_equal_but_for_ties(path, drafted, plain), counts_of(drafted)
    print(f"{family}: {num_plain} and {num_drafted} steps, {num_ties} ties, {counts}")
    assert counts.num_steps < counts.num_tokens and num_drafted <= num_plain


def taught(config) -> tuple[Answers, Answers, float, float]:
    """Greedy answers before the layer has learnt them and after, and its losses. The policy has no advantage."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    rollout, actor = worker.roles["rollout"], worker.roles["actor"]
    first = starts(config.trainer.seed, GREEDY)
    rollout.enter()
    before = in_slices(rollout.generator, first, None)
    rollout.exit()
    rows = [torch.tensor([*start.token_ids, *before[start.request].token_ids]) for start in first]
    lengths = torch.tensor([len(before[start.request].token_ids) for start in first])
    nothing = ragged([torch.zeros(int(length)) for length in lengths])
    batch = single_turn(ragged(rows), lengths, advantages=nothing, old_log_probs=nothing, rollout_log_probs=nothing)
    losses = [actor.update(batch.read_by(ACTOR_UPDATE)).get("actor/mtp_loss", 0.0) for _ in range(30)]
    rollout.enter()
    return before, in_slices(rollout.generator, first, None), losses[0], losses[-1]


@pytest.mark.parametrize("family", [pytest.param(each, marks=marks_of(each, OFTEN, SELDOM)) for each in WITH_MTP])
def test_generation_guesses_what_the_layer_has_learnt(tmp_path, family) -> None:
    """On two stages: the layer learns greedy answers while the policy stays, and the same answers then need fewer
    engine steps, so generation reads the layer that was trained. Would not catch what it learns of sampled answers.
    """
    path = WITH_MTP[family](tmp_path, repeats=False)
    keys = drafts("mtp") | {
        "actor_rollout_ref__actor__mtp_loss_scaling_factor": 1.0,
        "actor_rollout_ref__actor__optim__lr": 0.003,
        "actor_rollout_ref__actor__optim__weight_decay": 0.0,
    }
    before, after, first, last = run_ranks(2, taught, run_config(path, 1, 2, **keys), timeout=90)[1]
    must_be_equal(after, before)
    assert last < 0.5 * first
    assert counts_of(before).num_steps > 1.5 * counts_of(after).num_steps, (counts_of(before), counts_of(after))
