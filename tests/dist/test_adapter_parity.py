"""Adapters against PEFT: log-probs, gradients, greedy tokens, and the bytes of transitions, in every layout.

Why no number can depend on the layout: A's product of a linear that is cut by outputs is the same on all TP ranks, and
what comes back to it is summed over them; of a linear that is cut by inputs A's product is summed, so B sees the whole.
Under sequence parallelism the same sums run over parts of the tokens, and Megatron adds up the gradients of the half
that is whole on every rank. Stages and replicas treat an adapter as any other parameter. Experts' adapters are cut by
experts, and of what ranks that cut one expert hold whole the gradients are summed over them.

Not exercised: 16 bits, CUDA's kernels, vLLM's on a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft_oracle import (
    LINEARS,
    RANK,
    Oracle,
    check,
    run_adapted,
    whole_adapters,
)
from ranks import run_ranks
from tiny_gemma4 import save_gemma4_with_keys_for_values
from tiny_glm import save_glm4_moe_lite
from tiny_models import random_batch, run_config, save_deepseek_v3, save_llama, save_qwen2, save_qwen3_moe
from tiny_moonshot import save_kimi_k2
from tiny_qwen3_5 import save_qwen3_5, save_qwen3_5_moe, save_qwen3_next
from tiny_vision import save_gemma3_vision, save_qwen3_5_vision, save_qwen25_vl
from updates import NUM_ROWS

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.columns import SCORING

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

SP = {"actor__megatron__sequence_parallel": True}
OF_LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
OF_QWEN3_5 = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", *LINEARS]
OF_QWEN3_NEXT = ["in_proj_qkvz", "in_proj_ba", "out_proj", *LINEARS[:4]]


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
    "Kimi-K2": (save_kimi_k2, OF_LATENT),
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
OF_EXPERTS = ("DeepSeek-V3", "Kimi-K2", "GLM-4.7-Flash", "Qwen3-Next", "Qwen3.5-MoE")
ALIKE = ("Kimi-K2", "GLM-4.7-Flash", "Qwen2.5 inside", "Gemma-3 inside")
"""Their parts are in others: DeepSeek-V3, and Qwen3.5 inside. The first two read other names, in one process, too."""


BOTH = tuple(name for name in FURTHER if name not in ALIKE[:2])
"""In one process weekly: the sweeps have them cut, or others with their parts."""


def seldom(name: str, weekly: tuple[str, ...]) -> list[pytest.MarkDecorator]:
    return [pytest.mark.weekly] if name in weekly else []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(pytest.param(name, (1, 1, 1, {}), id=f"{name}-one", marks=seldom(name, BOTH)) for name in FURTHER),
        *(pytest.param(name, TP2_PP2, id=f"{name}-TP2xPP2", marks=seldom(name, ALIKE)) for name in FURTHER),
        *(pytest.param(name, EP2, id=f"{name}-EP2", marks=seldom(name, ALIKE)) for name in OF_EXPERTS),
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
    from megatron_rl.model.families.adapter_params import adapter_specs

    keys = {"actor_rollout_ref__model__lora__rank": RANK}
    alone = run_ranks(1, fresh_rank, run_config(oracle.model_path, 1, 1, **keys))
    cut = run_ranks(2, fresh_rank, run_config(oracle.model_path, 2, 1, **keys))
    specs = adapter_specs(ModelFolder(oracle.model_path).model.specs, LoraConfig(rank=RANK))
    for results in (alone, cut):
        assert all(torch.equal(*r["scores"]) and not r["memory"] for r in results)
    whole, others = (whole_adapters(results, "held", specs) for results in (alone, cut))
    assert all(torch.equal(tensor, others[name]) for name, tensor in whole.items())
    assert all(tensor.any() == name.endswith("lora_A.weight") for name, tensor in whole.items())
