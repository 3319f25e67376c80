"""Rollouts whose linears and experts are in 8 bits, on real engines: tokens, log-probs, bytes, addresses, staleness.

The reference is Hugging Face on a folder whose linears are rounded by the rounding of training in 8 bits, block by
block: what generation must compute, whoever quantized and whatever was merged.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from rollout_checks import (
    GREEDY,
    RANDOM,
    addresses,
    hugging_face_greedy,
    logprob_difference,
    round_trip,
    tokens,
    weights,
)
from rounded_folders import BLOCK, rounded_folder
from sweeps import marks_of
from tiny_gemma4 import save_gemma4_with_keys_for_values
from tiny_gpt_oss import save_gpt_oss
from tiny_models import random_batch, save_deepseek_v3, save_llama, save_moonlight, save_qwen2_moe, save_qwen3_moe
from tiny_mtp import save_glm4_with_mtp
from tiny_qwen3_5 import save_qwen3_5, save_qwen3_next
from transition_cases import EP2, ETP1, FOUR_KV_HEADS, MEGATRON, ROLLOUT, SP, Case

from megatron_rl.columns import ACTOR_UPDATE
from megatron_rl.planning.memory import plan_stages
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.transition import TransitionPlan

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

NUM_ROUNDS = 20
CODES = ("_proj.weight", "_with_mqa.weight", "_qkvz.weight", ".w13_weight", ".w2_weight")
"""What vLLM's names of weights in 8 bits end with."""
OPTIONS = {f"{ROLLOUT}quantization": "fp8", f"{ROLLOUT}quantization_block_size": BLOCK}
LORA = "actor_rollout_ref__model__lora__"
MERGED = {f"{LORA}rank": 8, f"{LORA}alpha": 64.0, f"{LORA}merge": True}
BF16 = OPTIONS | {f"{MEGATRON}dtype": "bfloat16"}
# Heads and columns of experts in whole blocks on two ranks.
WIDE = {"head_dim": 64, "moe_intermediate_size": 64}
SHARED = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
LATENT = {"moe_intermediate_size": 64, "num_hidden_layers": 4}
DELTA = {"head_dim": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
CASES = [
    Case("TP2PP2-TP2", 2, 2, 2, options=OPTIONS),
    Case("TP4-TP2", 4, 1, 2, model=FOUR_KV_HEADS | {"intermediate_size": 256}, options=OPTIONS),
    Case("TP2PP2-TP1", 2, 2, 1, options=OPTIONS),
    Case("PP2DP2-TP2", 1, 2, 2, dp=2, save=save_llama, options=OPTIONS),
    Case("TP2EP2ETP1-TP2-experts", 2, 1, 2, save=save_qwen3_moe, model=WIDE, options=OPTIONS | SP | EP2 | ETP1),
    Case("TP2PP2-TP1-shared-experts", 2, 2, 1, save=save_qwen2_moe, model=SHARED, options=OPTIONS | SP),
    Case(
        "TP2PP2-TP1-sinks",
        2,
        2,
        1,
        save=save_gpt_oss,
        model={"head_dim": 64, "intermediate_size": 128},
        options=OPTIONS | SP,
    ),
    Case("TP2PP2-TP1-latent", 2, 2, 1, save=save_deepseek_v3, model=LATENT, options=OPTIONS | SP),
    Case("TP2PP2-TP1-delta", 2, 2, 1, save=save_qwen3_5, model=DELTA, options=OPTIONS),
    Case(
        "TP2PP2-TP1-drafts",
        2,
        2,
        1,
        save=save_glm4_with_mtp,
        model={"head_dim": 64, "moe_intermediate_size": 64},
        options=OPTIONS | SP | {f"{ROLLOUT}speculative": "mtp"},
    ),
    Case("TP2EP2ETP1-TP2-latent", 2, 1, 2, save=save_moonlight, model=LATENT, options=OPTIONS | SP | EP2 | ETP1),
    Case("TP2PP2-TP2-delta", 2, 2, 2, save=save_qwen3_next, model=DELTA | SHARED, options=OPTIONS | SP),
    Case("TP2PP2-TP1-wide", 2, 2, 1, save=save_gemma4_with_keys_for_values, options=OPTIONS),
    Case("TP2PP2-TP1-merged", 2, 2, 1, save=save_llama, options=OPTIONS | MERGED),
    Case("TP2PP2-TP1-latent-merged", 2, 2, 1, save=save_deepseek_v3, model=LATENT, options=OPTIONS | SP | MERGED),
    Case(
        "TP2EP2ETP1-TP2-experts-merged",
        2,
        1,
        2,
        save=save_qwen3_moe,
        model=WIDE,
        options=OPTIONS | SP | EP2 | ETP1 | MERGED | {f"{LORA}target_modules": ["all-linear"]},
    ),
    Case("TP1-TP1", 1, 1, 1, options=OPTIONS, lacks=False),
    Case("TP2PP2-TP1-bfloat16", 2, 2, 1, options=BF16),
]
OFTEN = ("TP2PP2-TP1",)
SELDOM = ("TP4-TP2", "TP2EP2ETP1-TP2-latent", "TP2PP2-TP2-delta", "TP2PP2-TP1-latent-merged")
"""Weekly: parts and cuts that other cases have one by one."""


def round_trainer(worker) -> list[torch.Tensor]:
    """Round the actor's own linears in place, with adapters merged in; returns its weights of before."""
    from megatron_rl.model.eight_bits import E4M3, rounded
    from megatron_rl.model.families import eight_bit_names

    actor, before = worker.roles["actor"], weights(worker)
    specs = actor.base.specs
    codes = eight_bit_names(specs)
    with torch.no_grad():
        merge_adapters(actor)
        for name, parameter in actor.base.parameters.items():
            if specs[name].tensor.name in codes:
                # Blocks end where an expert does.
                parameter.copy_(rounded(parameter.flatten(0, -2), E4M3, (BLOCK, BLOCK)).view_as(parameter))
    return before


def merge_adapters(actor) -> None:
    """Add each product of an actor's adapters to its weight, and set the product to 0."""
    from megatron_rl.roles.merged_shards import merged_parameters

    if not actor.spec.lora.rank:
        return
    merged = merged_parameters(actor)
    for name, parameter in actor.base.parameters.items():
        parameter.copy_(merged(name))
    for name, parameter in merged.parameters.items():
        if "lora_B" in name:
            parameter.zero_()


def restore_trainer(worker, before: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(worker.roles["actor"].trainable.pipeline.parameters(), before, strict=True):
            parameter.copy_(value)


def train(worker, seed: int) -> None:
    rows = random_batch(8, seed)[worker.groups.dp_rank :: worker.groups.grid.dp_size]
    rows.add(old_log_probs=rows["rollout_log_probs"])
    worker.roles["actor"].update(rows.read_by(ACTOR_UPDATE))


def said_of_stale_codes(worker) -> str:
    """What entering raises when codes are those of older weights; the weights are as before afterwards."""
    from megatron_rl.hybrid_engine.verify import WeightMismatchError

    own, buffer = worker.roles["rollout"].weights.own, worker.roles["actor"].trainable.param_buffers[0].param_data
    older, renew = buffer.clone(), own.renew

    def renew_from_older_weights() -> None:
        newer = buffer.clone()
        buffer.copy_(older)
        renew()
        buffer.copy_(newer)

    buffer.mul_(1.3)
    own.renew = renew_from_older_weights
    try:
        worker.roles["rollout"].enter()
    except WeightMismatchError as error:
        return str(error)
    finally:
        own.renew = renew
        buffer.copy_(older)
    return ""


def eight_bit_rank(config, exported: str) -> dict:
    """What the tests look at, from one build of the engines."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    held = worker.roles["rollout"].weights
    foreign = [part.exchange.foreign for part in held.parts]
    outside = held.own.num_bytes + sum(buffer.num_bytes for buffer in foreign if buffer.is_allocated)
    untouched = weights(worker)
    first, report = round_trip(worker, GREEDY)
    is_untouched = all(map(torch.equal, weights(worker), untouched))
    seen = [addresses(worker)]
    sampled, _ = round_trip(worker, RANDOM)
    raw_difference = logprob_difference(worker, sampled)
    before = round_trainer(worker)
    difference = logprob_difference(worker, sampled)
    restore_trainer(worker, before)
    train(worker, 0)
    worker.roles["actor"].export_hf(Path(exported))
    second, second_report = round_trip(worker, GREEDY)
    for _ in range(NUM_ROUNDS):
        worker.roles["rollout"].enter()
        seen.append(addresses(worker))
        memory = worker.roles["rollout"].memory()
        worker.roles["rollout"].exit()
    last, _ = round_trip(worker, GREEDY)
    return {
        "stage": worker.groups.pp_rank,
        "outside": outside,
        "first": tokens(first),
        "second": tokens(second),
        "last": tokens(last),
        "difference": difference,
        "raw_difference": raw_difference,
        "report": report,
        "second_report": second_report,
        "untouched": is_untouched,
        "addresses": seen,
        "types": {name: str(p.dtype) for name, p in worker.roles["rollout"].generator.model.named_parameters()},
        "memory": memory,
        "scratch": max(part.exchange.scratch.num_bytes for part in held.parts),
        "said": said_of_stale_codes(worker),
    }


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=marks_of(case.name, OFTEN, SELDOM), id=case.name) for case in CASES],
)
def run(request, tmp_path_factory):
    case = request.param
    folder = tmp_path_factory.mktemp("eight")
    path = case.save(folder / "model", **case.model)
    config = case.config(path)
    ranks = run_ranks(case.world_size, eight_bit_rank, config, str(folder / "exported"))
    references = [
        rounded_folder(path, str(folder / "r1")),
        rounded_folder(str(folder / "exported"), str(folder / "r2")),
    ]
    return case, path, config, ranks, [hugging_face_greedy(reference) for reference in references]


def test_greedy_tokens_equal_hugging_face_with_rounded_weights(run) -> None:
    """Before and after an update. Would not catch an error that keeps every argmax; bfloat16 has near-ties."""
    case, _, _, ranks, (before, after) = run
    assert before != after
    assert all(rank["second"] == rank["last"] != rank["first"] for rank in ranks)
    if "bfloat16" not in case.name:
        assert all(rank["first"] == before and rank["second"] == after for rank in ranks)


def test_rollout_and_trainer_agree_when_the_trainer_is_rounded(run) -> None:
    """5e-5 in float32, at temperature 1; with the weights that are trained they differ by far more.

    Would not catch an error that both roundings share: tests/hybrid_engine/test_block_codes.py counts by hand.
    """
    case, _, _, ranks, _ = run
    last = [rank for rank in ranks if rank["difference"] is not None]
    assert last and all(rank["difference"] < (0.3 if "bfloat16" in case.name else 5e-5) for rank in last)
    assert "bfloat16" in case.name or all(rank["raw_difference"] > 1e-2 for rank in last)


def test_received_bytes_are_exactly_what_was_lacking(run) -> None:
    """One byte for each element and four for each block, by hand for TP2 x PP2 -> TP1; all else in full."""
    case, _, config, ranks, _ = run
    for rank in ranks:
        for report in (rank["report"], rank["second_report"]):
            assert report.bytes_received == report.lower_bound_bytes
            assert (report.bytes_received > 0) == case.lacks
    if case.name in ("TP2PP2-TP1", "TP2PP2-TP1-bfloat16"):
        element = 2 if "bfloat16" in case.name else 4
        # A layer: 4 + 2 + 2 heads of 32 and the output of 4 on 128 columns, and 3 x 192 columns of the MLP.
        layer = (256 + 128) * 128 + 3 * 192 * 128
        codes = layer + 4 * layer // BLOCK**2
        stay = 256 + 256  # biases and norms; norms are whole on every rank
        # Of four layers a rank holds half of two; the last stage lacks no final norm, and a tied embedding is on both.
        embedding = [6 * 128, 64 * 128]
        for number, rank in enumerate(ranks):
            kept = 2 * 256 // 2 + 2 * stay + embedding[number % 2] + (128 if rank["stage"] == 0 else 0)
            assert rank["report"].bytes_received == 3 * codes + kept * element, number


def test_addresses_stay_and_nothing_is_held_outside(run) -> None:
    """Over 20 rounds and an update, scales included, four or more a layer. Would not catch memory that vLLM keeps."""
    _, _, _, ranks, _ = run
    for rank in ranks:
        assert all(seen == rank["addresses"][0] for seen in rank["addresses"])
        assert sum(name.endswith("_scale_inv") for name in rank["addresses"][0]) >= 4 * 4
        assert rank["outside"] == 0


def test_linears_are_codes_and_training_keeps_its_weights(run) -> None:
    """Would not catch a copy that a kernel makes."""
    _, _, config, ranks, _ = run
    trained = f"torch.{config.actor_rollout_ref.actor.megatron.dtype}"
    for rank in ranks:
        assert rank["untouched"]
        for name, dtype in rank["types"].items():
            is_code = name.endswith(CODES) and not name.endswith("kv_b_proj.weight")
            assert dtype == ("torch.float8_e4m3fn" if is_code else "torch.float32" if "scale_inv" in name else trained)


def test_codes_of_older_weights_are_refused(run) -> None:
    """On every rank, as one whose own codes are right must not generate. Would not catch it where nothing verifies."""
    _, _, _, ranks, _ = run
    assert all("FP8 weights differ from the trained weights: model.layers" in rank["said"] for rank in ranks)


def test_the_plan_has_the_bytes_that_ranks_hold_and_receive(run) -> None:
    """To the byte, of the rank of each stage that holds most. Would not catch what vLLM allocates."""
    case, _, config, ranks, _ = run
    config.trainer.n_gpus_per_node = case.world_size
    models = RunModels(config)
    plans = plan_stages(models)
    for stage, plan in enumerate(plans):
        for name in ("received shards", "own codes"):
            held = max(rank["memory"][name] for rank in ranks if rank["stage"] == stage)
            assert plan.phases["gen"][name] == plan.phases["reshard"][name] == held, (stage, name)
        here = [rank for rank in ranks if rank["stage"] == stage]
        assert plan.exchanged["exchange scratch"] == max(rank["scratch"] for rank in here)
    plan = TransitionPlan.of(models)
    group = models.grid.exchange_group(0)
    assert [ranks[rank]["report"].bytes_received for rank in group] == [
        sum(each) for each in zip(plan.network, plan.link, strict=True)
    ]
