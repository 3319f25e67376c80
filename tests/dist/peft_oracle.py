"""Adapters as PEFT has them: log-probs, gradients and weights of one update, and ours beside them."""

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
from tiny_models import random_batch, run_config
from updates import NUM_ROWS, OPTIMIZER, collected, relative

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.columns import ACTOR_UPDATE, SCORING

RANK, ALPHA = 4, 10.0
"""vLLM holds 8 rows. The scale is 2.5, which vLLM does not have by itself."""
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


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
    from megatron_rl.model.families.adapter_params import adapter_specs

    lora = LoraConfig(rank=RANK, target_modules=oracle.targets, exclude_modules=oracle.excluded)
    specs = adapter_specs(ModelFolder(oracle.model_path).model.specs, lora)
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
