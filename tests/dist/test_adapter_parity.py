"""Adapters against PEFT: log-probs, gradients, greedy tokens, and the bytes of transitions, in every layout.

Why no number can depend on the layout: A's product of a linear that is cut by outputs is the same on all TP ranks, and
what comes back to it is summed over them; of a linear that is cut by inputs A's product is summed, so B sees the whole.
Under sequence parallelism the same sums run over parts of the tokens, and Megatron adds up the gradients of the half
that is whole on every rank. Stages and replicas treat an adapter as any other parameter. Experts' adapters are cut by
experts, and of what ranks that cut one expert hold whole the gradients are summed over them.

Not exercised: 16 bits, CUDA's kernels, vLLM's on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from rollout_checks import GREEDY, RANDOM, greedy_answers, logprob_difference, round_trip, tokens
from safetensors.torch import load_file, save_file
from tiny_gemma4 import save_gemma4_with_keys_for_values
from tiny_glm import save_glm4_moe_lite
from tiny_models import random_batch, run_config, save_deepseek_v3, save_llama, save_qwen2, save_qwen3_moe
from tiny_qwen3_5 import save_qwen3_5, save_qwen3_5_moe, save_qwen3_next
from tiny_vision import save_gemma3_vision, save_qwen3_5_vision, save_qwen25_vl
from updates import NUM_ROWS, OPTIMIZER, collected, relative

from megatron_rl.columns import ACTOR_UPDATE, SCORING

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

SP = {"actor__megatron__sequence_parallel": True}
RANK, ALPHA = 4, 10.0
"""vLLM holds 8 rows. The scale is 2.5, which vLLM does not have by itself."""
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OF_LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
OF_QWEN3_5 = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", *LINEARS]
OF_QWEN3_NEXT = ["in_proj_qkvz", "in_proj_ba", "out_proj", *LINEARS[:4]]


def peft_model(model_path: str, folder: Path | None = None, linears: Sequence[str] = LINEARS) -> Any:
    """transformers' model with the adapter in `folder`, or with a new one of `linears`, whose B is drawn too. Of a
    larger model its language model alone has one.
    """
    from peft import LoraConfig, PeftModel, get_peft_model

    from megatron_rl.controller.report import hf_model

    base = hf_model(model_path).requires_grad_(False)
    if folder is not None:
        return PeftModel.from_pretrained(base, folder, is_trainable=True)
    is_larger = hasattr(base.model, "language_model")
    targets = rf".*language_model.*\.({'|'.join(linears)})" if is_larger else list(linears)
    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(base, settings)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def write_adapters_of(model_path: str, folder: Path) -> None:
    """A PEFT folder with adapters of attention and of every expert under its own name, A and B drawn."""
    base = load_file(f"{model_path}/model.safetensors")
    torch.manual_seed(2)
    tensors, targets = {}, set[str]()
    for name, weight in base.items():
        matrix = name.removesuffix(".weight")
        if matrix.rpartition(".")[2] in LINEARS:
            tensors[f"base_model.model.{matrix}.lora_A.weight"] = 0.1 * torch.randn(RANK, weight.shape[1])
            tensors[f"base_model.model.{matrix}.lora_B.weight"] = 0.05 * torch.randn(weight.shape[0], RANK)
            targets.add(matrix.rpartition(".")[2])
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA}
    settings |= {"base_model_name_or_path": model_path, "target_modules": sorted(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def matrices(name: str, tensor: torch.Tensor, num_experts: int) -> dict[str, torch.Tensor]:
    """Names as in a folder -> views of a tensor of PEFT's. It holds A and B of all experts in one, those of gate and
    up as one of twice the rank, whose B has two blocks; what is outside of them is none of ours.
    """
    block, is_experts, rest = name.partition(".mlp.experts.")
    if not is_experts:
        return {name: tensor}
    is_a, views = "lora_A" in rest, {}
    parts = ["gate_proj", "up_proj"] if rest.startswith("base_layer.") else ["down_proj"]
    ranks = RANK * len(parts)
    stack = tensor.view(num_experts, ranks, -1) if is_a else tensor.view(-1, ranks, num_experts).permute(2, 0, 1)
    rows = stack.shape[1] // len(parts)
    for number, part in enumerate(parts):
        own = slice(number * RANK, (number + 1) * RANK)
        view = stack[:, own] if is_a else stack[:, number * rows : (number + 1) * rows, own]
        kind = "lora_A" if is_a else "lora_B"
        views |= {f"{block}.mlp.experts.{e}.{part}.{kind}.weight": view[e] for e in range(num_experts)}
    return views


def adapted_rank(config) -> dict:
    """Everything that the tests look at, from one build of actor, reference and rollout."""
    from dataclasses import replace

    from megatron_rl.config.roles import Placement
    from megatron_rl.model.adapters import adapters_of
    from megatron_rl.planning.run_models import RunModels
    from megatron_rl.roles.host import RankHost
    from megatron_rl.roles.model_source import named_parameters
    from megatron_rl.roles.role_classes import build_role

    worker = RankHost(config)
    for role in ("actor", "reference", "rollout"):
        if role in Placement.of(config).roles:
            worker.build(role)
    actor, where = worker.roles["actor"], worker.coordinates()
    rows = torch.arange(NUM_ROWS).tensor_split(where.dp_size)[where.dp_rank]
    mine = random_batch(NUM_ROWS)[rows]

    def score(method) -> torch.Tensor | None:
        scores = method(mine.read_by(SCORING))
        return None if scores is None else scores.flat(scores.names[0])

    def held() -> dict[str, torch.Tensor]:
        named = named_parameters(actor.trainable.models)
        return {name: named[name].detach().clone() for name in actor.trained.parameters}

    result: dict[str, Any] = {"where": where, "place": actor.source.place, "before": held()}
    frozen = [buffer.param_data.clone() for buffer in actor.trainable.frozen]
    result["log_probs"] = score(actor.log_probs)
    reference = worker.roles["reference"]
    apart = build_role(replace(reference.spec, model_of=None), worker.rank, {})  # as in a pool without the actor
    result |= {"ref_log_probs": score(reference.log_probs), "ref_apart": score(apart.log_probs)}
    planned = RunModels(config).training.ledger(reference.spec).held(worker.groups.pp_rank).named(reference.spec)
    result["ref_memory"] = reference.memory(), planned
    greedy, first = round_trip(worker, GREEDY)
    sampled, second = round_trip(worker, RANDOM)
    result |= {"greedy": tokens(greedy), "reports": [first, second]}
    result["difference"] = logprob_difference(worker, sampled)
    result["update"] = actor.update(mine.read_by(ACTOR_UPDATE))
    result["after"] = held()
    result |= {"log_probs_after": score(actor.log_probs), "ref_after": score(reference.log_probs)}
    for adapters in adapters_of(actor.trainable.models):
        adapters.initial.clear()  # as without adapter_path
    result["base_log_probs"] = score(reference.log_probs)
    again, _ = round_trip(worker, GREEDY)
    result["greedy_after"] = tokens(again)
    result["difference_after"] = logprob_difference(worker, again)
    buffers = actor.trainable.frozen
    result["base_moved"] = not all(torch.equal(b.param_data, was) for b, was in zip(buffers, frozen, strict=True))
    result["memory"] = worker.owned_memory()
    return result


def whole_adapters(results: list[dict], field: str, specs) -> dict[str, torch.Tensor]:
    """PEFT's names -> whole tensors, cut to the rank that was asked for, from all ranks' shards."""
    from megatron_rl.checkpoint.hf_tensors import hf_tensors, pieces, put_together

    held = {rank: r[field] for rank, r in enumerate(results)}
    places = {rank: r["place"] for rank, r in enumerate(results)}
    whole = {}
    for tensor in hf_tensors(specs):
        holders = [rank for rank, weights in held.items() if tensor.parameter in weights]
        parts = pieces(tensor, holders, places)
        matrix = put_together(tensor, ((p, held[p.rank][tensor.parameter][p.source]) for p in parts))
        is_a = tensor.name.endswith("lora_A.weight")
        beyond = matrix[RANK:] if is_a else matrix[:, RANK:]
        assert not beyond.any(), f"{tensor.name}: rows beyond the rank are not 0"
        whole[tensor.name] = matrix[:RANK] if is_a else matrix[:, :RANK]
    return whole


def log_probs_of(model: Any) -> torch.Tensor:
    """Log-prob of every sampled token of the batch, one row after the other."""
    batch, of_rows = random_batch(NUM_ROWS), []
    for ids, length in zip(batch["input_ids"].unbind(), batch.num_sampled.tolist(), strict=True):
        log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        of_rows.append(log_probs.gather(-1, ids[1:, None])[-length:, 0])
    return torch.cat(of_rows)


class Oracle:
    """What transformers with PEFT computes: before, one PPO update of the adapters by hand, and after."""

    def __init__(
        self, model_path: str, folder: Path, linears: Sequence[str] = LINEARS, *, experts: bool = False
    ) -> None:
        """experts: they have adapters as well."""
        self.model_path, self.folder, self.targets = model_path, folder, ["all-linear"]
        self.excluded = [] if experts or linears == LINEARS else ["*.experts.*"]
        if experts:
            write_adapters_of(model_path, folder)
        else:
            peft_model(model_path, None, linears).save_pretrained(folder)
        self.file = load_file(folder / "adapter_model.safetensors")
        model = peft_model(model_path, folder)
        log_probs = log_probs_of(model)
        self.log_probs, self.greedy = log_probs.detach(), greedy_answers(model)
        with torch.no_grad(), model.disable_adapter():
            self.base_log_probs = log_probs_of(model)
        advantages = random_batch(NUM_ROWS).flat("advantages")
        (-(advantages * log_probs).mean()).backward()
        num_experts = getattr(model.config, "num_experts", 0)
        named: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                views, grads = (
                    matrices(name.replace(".default.", "."), tensor, num_experts)
                    for tensor in (parameter.detach(), parameter.grad)
                )
                named |= {each: (view, grads[each]) for each, view in views.items()}
        assert named.keys() == self.file.keys()
        assert all(torch.equal(view, self.file[name]) for name, (view, _) in named.items())
        norm = torch.stack([grad.norm() for _, grad in named.values()]).norm()
        self.grad_norm, self.after = float(norm), {}
        factor = min(1.0, 1.0 / (self.grad_norm + 1e-6))
        with torch.no_grad():
            for name, (parameter, own) in named.items():
                grad = own * factor
                # Adam's first step, whose moments are the gradient and its square.
                parameter -= OPTIMIZER["lr"] * grad / (grad.abs() + OPTIMIZER["eps"])
                self.after[name] = parameter.clone()
            self.log_probs_after, self.greedy_after = log_probs_of(model), greedy_answers(model)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> Oracle:
    folder = tmp_path_factory.mktemp("dense")
    return Oracle(save_qwen2(folder / "model"), folder / "peft")


@pytest.fixture(scope="module")
def expert_oracle(tmp_path_factory) -> Oracle:
    """The oracle of a model whose MLPs are experts, which have no adapters."""
    folder = tmp_path_factory.mktemp("experts")
    return Oracle(save_qwen3_moe(folder / "model"), folder / "peft", LINEARS[:4])


@pytest.fixture(scope="module")
def adapted_experts(tmp_path_factory) -> Oracle:
    """The oracle of a model whose experts have adapters as well."""
    folder = tmp_path_factory.mktemp("adapted")
    return Oracle(save_qwen3_moe(folder / "model"), folder / "peft", experts=True)


def run_adapted(oracle: Oracle, world_size: int, tp_size: int, pp_size: int, **keys) -> list[dict]:
    lora = {"rank": RANK, "alpha": ALPHA, "adapter_path": str(oracle.folder), "exclude_modules": oracle.excluded}
    lora["target_modules"] = oracle.targets
    overrides: dict[str, Any] = {f"actor_rollout_ref__model__lora__{key}": value for key, value in lora.items()}
    overrides |= {f"actor_rollout_ref__actor__optim__{key}": value for key, value in OPTIMIZER.items()}
    overrides |= {f"actor_rollout_ref__{key}": value for key, value in keys.items()}
    return run_ranks(world_size, adapted_rank, run_config(oracle.model_path, tp_size, pp_size, **overrides))


def check(results: list[dict], oracle: Oracle) -> None:
    """Everything against PEFT: 1e-5 relative, log-probs of vLLM 3e-5, tokens exactly. The reference is the policy with
    the adapters that it starts from, to the last bit, also after an update.
    """
    from megatron_rl.checkpoint.hf_tensors import hf_tensors
    from megatron_rl.config.lora import LoraConfig
    from megatron_rl.model.families import Model
    from megatron_rl.model.families.adapter_params import adapter_specs

    lora = LoraConfig(rank=RANK, target_modules=oracle.targets, exclude_modules=oracle.excluded)
    specs = adapter_specs(Model.read(oracle.model_path).specs, lora)
    assert {tensor.name for tensor in hf_tensors(specs)} == oracle.file.keys()
    for field in ("log_probs", "base_log_probs", "log_probs_after"):
        assert relative(collected(results, field), getattr(oracle, field)) < 1e-5, field
    for field in ("ref_log_probs", "ref_apart", "ref_after"):
        assert torch.equal(collected(results, field), collected(results, "log_probs")), field
    assert relative(oracle.log_probs, oracle.base_log_probs) > 1e-2  # the adapters do something
    assert all(r["update"]["actor/grad_norm"] == pytest.approx(oracle.grad_norm, rel=1e-5) for r in results)
    for field, expected in (("before", oracle.file), ("after", oracle.after)):
        ours = whole_adapters(results, field, specs)
        assert ours.keys() == expected.keys()
        for name, tensor in expected.items():
            assert relative(ours[name], tensor) < 1e-5, name
    by_replica = {r["where"].replica: r for r in results}
    for field in ("greedy", "greedy_after"):
        assert all(r[field] == getattr(oracle, field) for r in by_replica.values()), field
    differences = [r[name] for r in results for name in ("difference", "difference_after") if r[name] is not None]
    assert differences and max(differences) < 3e-5
    assert not any(r["base_moved"] for r in results)
    for result in results:
        held, planned = result["ref_memory"]
        own = sum(tensor.nbytes for tensor in result["before"].values())
        assert held == planned == {"reference parameters": own}


@pytest.mark.parametrize(
    ("world_size", "tp_size", "pp_size", "keys"),
    [
        pytest.param(1, 1, 1, {}, id="one", marks=pytest.mark.exhaustive),
        pytest.param(4, 2, 2, SP | {"ref__megatron__param_offload": True}, id="TP2xPP2-SP"),
    ],
)
def test_adapters_equal_peft(oracle: Oracle, world_size: int, tp_size: int, pp_size: int, keys: dict) -> None:
    """Would not catch an error of 16 bits. The base is brought once: later transitions move adapters alone."""
    results = run_adapted(oracle, world_size, tp_size, pp_size, **keys)
    check(results, oracle)
    specs_bytes = sum(tensor.nbytes for tensor in results[0]["before"].values())
    for result in results:
        for report in result["reports"]:
            assert report.bytes_received == report.lower_bound_bytes
            assert report.bytes_received <= (pp_size - 1) * 2 * specs_bytes


A_LAYOUT = "actor__megatron__"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("world_size", "tp_size", "pp_size", "keys"),
    [
        pytest.param(2, 2, 1, {}, id="TP2"),
        pytest.param(2, 1, 2, {"model__lora__base": "refetch"}, id="PP2-refetch"),
        pytest.param(2, 1, 2, {"model__lora__base": "host"}, id="PP2-host"),
        pytest.param(2, 1, 1, {"model__use_remove_padding": False}, id="DP2-padded"),
        pytest.param(2, 1, 1, {f"{A_LAYOUT}context_parallel_size": 2}, id="CP2"),
        pytest.param(4, 1, 2, {f"{A_LAYOUT}virtual_pipeline_model_parallel_size": 2}, id="PP2xVPP2xDP2"),
        pytest.param(
            2, 2, 1, {f"{A_LAYOUT}override_transformer_config__recompute_granularity": "full"}, id="recomputed"
        ),
        pytest.param(
            2, 2, 1, {"rollout__drop_train_weights": True, "rollout__tensor_model_parallel_size": 1}, id="dropped"
        ),
    ],
)
def test_adapters_equal_peft_in_further_layouts(
    oracle: Oracle, world_size: int, tp_size: int, pp_size: int, keys: dict
) -> None:
    """Would not catch an error of 16 bits."""
    if "recompute_granularity" in "".join(keys):
        keys = keys | {
            f"{A_LAYOUT}override_transformer_config__recompute_{name}": value
            for name, value in (("method", "uniform"), ("num_layers", 1))
        }
    check(run_adapted(oracle, world_size, tp_size, pp_size, **keys), oracle)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("world_size", "tp_size", "pp_size"), [(1, 1, 1), (4, 2, 2)], ids=["one", "TP2xPP2"])
def test_merged_adapters_equal_peft(oracle: Oracle, world_size: int, tp_size: int, pp_size: int) -> None:
    """Generation reads merged weights, and after an update those of the new adapters; every transition moves them all.

    Would not catch an error of 16 bits, in which merging rounds.
    """
    results = run_adapted(oracle, world_size, tp_size, pp_size, model__lora__merge=True)
    check(results, oracle)
    for result in results:
        first, second = result["reports"]
        assert first.bytes_received == second.bytes_received == first.lower_bound_bytes
        assert (first.bytes_received > 0) == (pp_size > 1)


@pytest.mark.exhaustive
def test_merged_ranks_have_the_same_adapters(tmp_path: Path) -> None:
    """TP4 for training, TP2 for generation: two ranks' shards of B become one. Would not catch an error of 16 bits."""
    oracle = Oracle(save_llama(tmp_path / "model", num_key_value_heads=4), tmp_path / "peft")
    check(run_adapted(oracle, 4, 4, 1, rollout__tensor_model_parallel_size=2), oracle)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("world_size", "keys"),
    [pytest.param(1, {}, id="one"), pytest.param(2, {f"{A_LAYOUT}expert_model_parallel_size": 2}, id="EP2")],
)
def test_adapters_beside_experts_equal_peft(expert_oracle: Oracle, world_size: int, keys: dict) -> None:
    """Attention has adapters, experts have none. Would not catch an error of 16 bits."""
    check(run_adapted(expert_oracle, world_size, 1, 1, **keys), expert_oracle)


SP_EP2 = {f"{A_LAYOUT}sequence_parallel": True, f"{A_LAYOUT}expert_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("world_size", "tp_size", "keys"),
    [
        pytest.param(1, 1, {}, id="one", marks=pytest.mark.exhaustive),
        pytest.param(2, 1, {f"{A_LAYOUT}expert_model_parallel_size": 2}, id="EP2"),
        pytest.param(
            2, 2, SP_EP2 | {f"{A_LAYOUT}expert_tensor_parallel_size": 1}, id="TP2-EP2", marks=pytest.mark.exhaustive
        ),
        pytest.param(4, 2, SP_EP2, id="TP2xEP2", marks=pytest.mark.exhaustive),
    ],
)
def test_adapters_of_experts_equal_peft(adapted_experts: Oracle, world_size: int, tp_size: int, keys: dict) -> None:
    """Every expert has adapters, and generation reads them merged. Of TP2-EP2 every TP rank has experts of its own, of
    TP2xEP2 each expert is cut in two.

    Would not catch an error of 16 bits, in which merging rounds.
    """
    results = run_adapted(adapted_experts, world_size, tp_size, 1, model__lora__merge=True, **keys)
    check(results, adapted_experts)
    for result in results:
        assert all(report.bytes_received == report.lower_bound_bytes for report in result["reports"])


FURTHER = {
    "DeepSeek-V3": (save_deepseek_v3, OF_LATENT),
    "GLM-4.7-Flash": (save_glm4_moe_lite, OF_LATENT),
    "Qwen3-Next": (save_qwen3_next, OF_QWEN3_NEXT),
    "Qwen3.5": (save_qwen3_5, OF_QWEN3_5),
    "Qwen3.5-MoE": (save_qwen3_5_moe, OF_QWEN3_5[:-3]),
    "Gemma-4": (save_gemma4_with_keys_for_values, LINEARS),
    "Qwen3.5 inside": (save_qwen3_5_vision, OF_QWEN3_5),
    "Qwen2.5 inside": (save_qwen25_vl, LINEARS),
    "Gemma-3 inside": (save_gemma3_vision, LINEARS),
}
TP2_PP2 = (4, 2, 2, SP)
EP2 = (2, 1, 1, {f"{A_LAYOUT}expert_model_parallel_size": 2})
OF_EXPERTS = ("DeepSeek-V3", "GLM-4.7-Flash", "Qwen3-Next", "Qwen3.5-MoE")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(pytest.param(name, (1, 1, 1, {}), id=f"{name}-one") for name in FURTHER),
        *(pytest.param(name, TP2_PP2, id=f"{name}-TP2xPP2") for name in FURTHER),
        *(pytest.param(name, EP2, id=f"{name}-EP2") for name in OF_EXPERTS),
    ],
)
def test_adapters_of_other_attention_equal_peft(name: str, layout: tuple[int, int, int, dict], tmp_path: Path) -> None:
    """Latent attention, the gated delta rule and keys for values; MLPs of models with experts have none: PEFT reads
    them as the experts'. Would not catch an error of 16 bits.
    """
    save_model, linears = FURTHER[name]
    oracle = Oracle(save_model(tmp_path / "model"), tmp_path / "peft", linears)
    oracle.targets, oracle.excluded = linears, []
    world_size, tp_size, pp_size, keys = layout
    check(run_adapted(oracle, world_size, tp_size, pp_size, model__lora__merge=True, **keys), oracle)


def fresh_rank(config) -> dict:
    """Log-probs of actor and reference before any update, and each rank's A."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("reference")
    batch = random_batch(NUM_ROWS).read_by(SCORING)
    scores = [worker.roles[name].log_probs(batch) for name in ("actor", "reference")]
    actor = worker.roles["actor"]
    memory = worker.roles["reference"].memory()
    held = {name: p.detach().clone() for name, p in actor.trained.parameters.items()}
    flat = [None if each is None else each.flat(each.names[0]) for each in scores]
    return {"scores": flat, "place": actor.source.place, "held": held, "memory": memory}


def test_new_adapters_are_the_reference(oracle: Oracle) -> None:
    """KL is exactly 0 before the first update, the reference takes no memory, and A does not depend on the layout."""
    from megatron_rl.config.lora import LoraConfig
    from megatron_rl.model.families import Model
    from megatron_rl.model.families.adapter_params import adapter_specs

    keys = {"actor_rollout_ref__model__lora__rank": RANK}
    alone = run_ranks(1, fresh_rank, run_config(oracle.model_path, 1, 1, **keys))
    cut = run_ranks(2, fresh_rank, run_config(oracle.model_path, 2, 1, **keys))
    specs = adapter_specs(Model.read(oracle.model_path).specs, LoraConfig(rank=RANK))
    for results in (alone, cut):
        assert all(torch.equal(*r["scores"]) and not r["memory"] for r in results)
    whole, others = (whole_adapters(results, "held", specs) for results in (alone, cut))
    assert all(torch.equal(tensor, others[name]) for name, tensor in whole.items())
    assert all(tensor.any() == name.endswith("lora_A.weight") for name, tensor in whole.items())
