"""Rollouts in 8 bits with adapters, on real engines: codes against a loop, log-probs, bytes, memory, addresses.

Beside the base adapters are in the training dtype, and the base's codes are those of the folder. Merged adapters are in
the codes, which are those of the exported folder.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from rollout_checks import RANDOM, addresses, logprob_difference, round_trip
from safetensors.torch import load_file
from tiny_models import random_batch, save_deepseek_v3, save_llama, save_qwen3_moe
from tiny_qwen3_5 import save_qwen3_5
from transition_cases import EP2, ETP1, ROLLOUT, SP, Case

from megatron_rl.columns import ACTOR_UPDATE
from megatron_rl.hybrid_engine.plan import ON_HOST
from megatron_rl.parallel.scale_blocks import SCALES
from megatron_rl.planning.memory import plan_stages
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.transition import TransitionPlan

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

BLOCK, NUM_ROUNDS = 32, 20
OPTIONS = {f"{ROLLOUT}quantization": "fp8", f"{ROLLOUT}quantization_block_size": BLOCK}
WIDE = {"head_dim": 64, "moe_intermediate_size": 64}
LATENT = {"moe_intermediate_size": 64, "num_hidden_layers": 4}
DELTA = {"head_dim": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
LORA, ATTENTION = "actor_rollout_ref__model__lora__", ["linear_qkv", "linear_proj"]
BESIDE = OPTIONS | {f"{LORA}rank": 4, f"{LORA}alpha": 10.0}
ALL = {f"{LORA}target_modules": ["all-linear"]}
MERGED = BESIDE | {f"{LORA}merge": True}
ADAPTED = [
    Case("beside", 2, 2, 1, options=BESIDE),
    Case("beside-on-host", 2, 2, 1, options=BESIDE | {f"{LORA}base": "host"}),
    Case("beside-TP2-refetched", 1, 2, 2, save=save_llama, options=BESIDE | {f"{LORA}base": "refetch"}),
    Case(
        "beside-experts",
        2,
        1,
        1,
        save=save_qwen3_moe,
        model=WIDE,
        options=BESIDE | SP | EP2 | ETP1 | {f"{LORA}target_modules": ATTENTION},
    ),
    Case("merged", 2, 2, 1, options=MERGED),
    Case("merged-experts", 2, 1, 1, save=save_qwen3_moe, model=WIDE, options=MERGED | SP | EP2 | ETP1),
    Case(
        "merged-experts-TP2EP2",
        *(2, 1, 2),
        save=save_qwen3_moe,
        model=WIDE,
        options=MERGED | SP | EP2 | ETP1,
        rollout_ep=2,
    ),
    Case("merged-latent", 2, 2, 1, save=save_deepseek_v3, model=LATENT, options=MERGED | SP | ALL),
    Case("merged-delta", 2, 2, 1, save=save_qwen3_5, model=DELTA, options=MERGED),
]
PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
}
"""vLLM's name of a linear -> those that it is made of."""


def train(worker, seed: int) -> None:
    rows = random_batch(8, seed)[worker.groups.dp_rank :: worker.groups.grid.dp_size]
    rows.add(old_log_probs=rows["rollout_log_probs"])
    worker.roles["actor"].update(rows.read_by(ACTOR_UPDATE))


def adapted_rank(config, exported: str) -> dict:
    """What the tests of adapters look at, from one build of the engines. B is not zero from the start."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    actor, rollout = worker.roles["actor"], worker.roles["rollout"]
    outside = {name: size for name, size in rollout.memory().items() if size}
    with torch.no_grad():
        for name, parameter in actor.trained.parameters.items():
            if "lora_B" in name:
                parameter.fill_(0.02)  # equal on ranks that hold it whole
    sampled, report = round_trip(worker, RANDOM)
    raw_difference = logprob_difference(worker, sampled)
    base = {name: parameter.detach().clone() for name, parameter in actor.base.parameters.items()}
    round_adapted(actor)
    difference = logprob_difference(worker, sampled)
    with torch.no_grad():
        for name, value in base.items():
            actor.base.parameters[name].copy_(value)
    train(worker, 0)
    actor.export_hf(Path(exported))
    seen, reports = [], [report]
    for _ in range(NUM_ROUNDS):
        reports.append(rollout.enter())
        seen.append(addresses(worker))
        memory, tensors = rollout.memory(), rollout.weights.tensors
        coded = [name for name in tensors if name + SCALES in tensors]
        codes = {name: read_codes(tensors[name], tensors[name + SCALES]) for name in coded}
        rollout.exit()
    return {
        "stage": worker.groups.pp_rank,
        "outside": outside,
        "difference": difference,
        "raw_difference": raw_difference,
        "reports": reports,
        "addresses": seen,
        "memory": memory,
        "codes": codes,
        "scratch": max(part.exchange.scratch.num_bytes for part in rollout.weights.parts),
    }


def read_codes(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers of codes of one matrix, or of a stack of matrices."""
    from megatron_rl.hybrid_engine.block_codes import dequantized

    if codes.dim() == 2:
        return dequantized(codes, scales, torch.float32)
    return torch.stack([dequantized(*each, torch.float32) for each in zip(codes, scales, strict=True)])


def round_adapted(actor) -> None:
    """Give the actor's base such values that it computes what generation reads, whether adapters are merged or not."""
    from megatron_rl.checkpoint.adapter_weights import MergedParameters
    from megatron_rl.model.eight_bits import E4M3, rounded
    from megatron_rl.model.families import eight_bit_names
    from megatron_rl.roles.model_source import named_parameters

    source, specs = actor.source, actor.base.specs
    named = named_parameters(actor.trainable.models)
    whole = MergedParameters(named, dict(specs), source.adapter_specs, source.place, source.lora.scale)
    codes = eight_bit_names(specs)
    with torch.no_grad():
        for name, parameter in actor.base.parameters.items():
            if specs[name].tensor.name in codes:
                added = whole(name) - parameter if source.lora.is_merged else torch.zeros_like(parameter)
                read = rounded((parameter + added).flatten(0, -2), E4M3, (BLOCK, BLOCK)).view_as(parameter)
                parameter.copy_(read - added)


def looped(name: str, folder: dict[str, torch.Tensor]) -> torch.Tensor:
    """A weight of vLLM's made of a folder's matrices, each rounded by itself."""
    from megatron_rl.model.eight_bits import E4M3, rounded

    def one(matrix: str) -> torch.Tensor:
        return rounded(folder[f"{matrix}.weight"], E4M3, (BLOCK, BLOCK))

    if name.endswith((".w13_weight", ".w2_weight")):
        experts = name.partition(".experts.")[0] + ".experts."
        parts = ("gate_proj", "up_proj") if name.endswith(".w13_weight") else ("down_proj",)
        numbers = sorted({int(each.removeprefix(experts).split(".")[0]) for each in folder if each.startswith(experts)})
        return torch.stack([torch.cat([one(f"{experts}{number}.{part}") for part in parts]) for number in numbers])
    parent, _, own = name.removesuffix(".weight").rpartition(".")
    return torch.cat([one(f"{parent}.{part}") for part in PACKED.get(own, (own,))])


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, marks=[] if case.name == "beside" else pytest.mark.exhaustive, id=case.name)
        for case in ADAPTED
    ],
)
def adapted(request, tmp_path_factory):
    case = request.param
    folder = tmp_path_factory.mktemp("adapted")
    path = case.save(folder / "model", **case.model)
    config = case.config(path)
    ranks = run_ranks(case.world_size, adapted_rank, config, str(folder / "exported"))
    read = folder / "exported" if config.actor_rollout_ref.model.lora.merge else Path(path)
    return case, config, ranks, load_file(read / "model.safetensors")


def test_codes_with_adapters_are_those_of_a_loop(adapted) -> None:
    """Bit for bit: the folder's matrices are rounded one by one, with adapters merged in, or without beside them.

    Would not catch it where generation cuts matrices: ranks hold whole ones here.
    """
    case, _, ranks, folder = adapted
    if case.rollout_tp > 1:
        return
    for rank in ranks:
        assert len(rank["codes"]) >= 8
        assert all(torch.equal(codes, looped(name, folder)) for name, codes in rank["codes"].items())


def test_rollout_and_trainer_agree_with_adapters(adapted) -> None:
    """5e-5 where the trainer is rounded likewise. Would not catch an error that both share."""
    _, _, ranks, _ = adapted
    last = [rank for rank in ranks if rank["difference"] is not None]
    assert last and all(rank["difference"] < 5e-5 and rank["raw_difference"] > 1e-2 for rank in last)


def test_bytes_and_memory_with_adapters_are_as_planned(adapted) -> None:
    """In every round to the byte; a frozen base moves once, and addresses stay. Would not catch what vLLM allocates."""
    case, config, ranks, _ = adapted
    config.trainer.n_gpus_per_node = case.world_size
    models = RunModels(config)
    plan, group = TransitionPlan.of(models), models.grid.exchange_group(0)
    assert (plan.once is not None) == config.actor_rollout_ref.model.lora.keeps_base
    for number, rank in enumerate(group):
        assert all(report.bytes_received == report.lower_bound_bytes for report in ranks[rank]["reports"])
        assert {report.bytes_received for report in ranks[rank]["reports"]} == {plan.received[number]}
        assert all(seen == ranks[rank]["addresses"][0] for seen in ranks[rank]["addresses"])
    for stage, planned in enumerate(plan_stages(models)):
        here = [rank for rank in ranks if rank["stage"] == stage]
        held = {name: max(rank["memory"][name] for rank in here) for name in here[0]["memory"]}
        held.pop("KV cache")
        assert {name: planned.phases["gen"][name] for name in held} == held
        outside = {name: max(rank["outside"][name] for rank in here) for name in here[0]["outside"]}
        names = ("received shards", "own codes", ON_HOST)
        assert outside == {
            name: size for name, size in planned.phases["update_actor"].items() if name in names and size
        }
        assert planned.exchanged["exchange scratch"] == max(rank["scratch"] for rank in here)
