"""Compiled code is kept for a key. Each configuration key that reaches vLLM changes that key, or no constant.

Code of another key would run with the constants of the run that compiled it. Whole engines are compared in
tests/rehearse; these are the arguments, and what our own changes to vLLM put into its graphs.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.config.lora import LoraConfig
from megatron_rl.config.rollout_keys import RolloutConfig
from megatron_rl.model.parts import GroupedAttention
from megatron_rl.rollout.arguments import GATED_DELTA, engine_arguments, with_adapter
from third_party_patches import VLLM, modules_for
from third_party_patches.vllm.adapter_views import Given, bind

pytestmark = pytest.mark.timeout(120)

ATTENTION = GroupedAttention(64, num_heads=4, num_kv_heads=2, head_size=16)
BASE = RolloutConfig(tensor_model_parallel_size=1, enforce_eager=False)
Q_PROJ, O_PROJ = ([f"model.layers.0.self_attn.{name}_proj.lora_A"] for name in ("q", "o"))

SECOND_VALUES = {"speculative": "ngram", "prefix_match_unit": 8, "gpu_memory_utilization": 0.5}
"""Values of keys that have no number to change."""
NO_CONSTANTS = {
    "kv_cache_memory_bytes": "graphs read the cache by address",
    "prefix_match_unit": "the scheduler's; CPUs only",
    "disable_custom_all_reduce": "graphs call one operator, which asks the group; fusing is a pass, which has a key",
}
OF_CONTEXTS = {
    ("adapter_views", "tensors"): "their projections are lora_target_modules, their rows max_lora_rank",
    ("adapter_views", "scale"): "additional_config",
    ("rank_order", "order"): "additional_config has the place in the TP group",
}
"""What our changes to vLLM are given when an engine is built: where the key has it."""

Keys = Callable[[dict[str, Any]], str]


@pytest.fixture
def key_of(vllm_config_of: Callable[[dict[str, Any]], Any]) -> Keys:
    return lambda arguments: vllm_config_of(arguments).compute_hash()


def arguments(folder: str, config: RolloutConfig = BASE, **changes: Any) -> dict[str, Any]:
    usual = {"max_model_len": 64, "dtype": "bfloat16", "seed": 1, "hf_overrides": {}, "attention": ATTENTION}
    return engine_arguments("cuda", folder, config, **usual | changes)


def other_values() -> Iterator[tuple[str, Any]]:
    """Every key of the rollout's group, with a second value."""
    for field in fields(RolloutConfig):
        value = getattr(BASE, field.name)
        if field.name in SECOND_VALUES:
            yield field.name, SECOND_VALUES[field.name]
        elif isinstance(value, bool):
            yield field.name, not value
        elif isinstance(value, int | float):
            yield field.name, value * 2 or 1


def test_every_key_of_the_rollout_has_its_compiled_code(moe_folder: str, key_of: Keys) -> None:
    """Of all keys those with other arguments have another key, but for three. Would not catch a reason that is wrong,
    or a string that is neither.
    """
    plain = arguments(moe_folder)
    reaching = {
        name: given
        for name, value in other_values()
        if (given := arguments(moe_folder, replace(BASE, **{name: value}))) != plain
    }
    assert {"tensor_model_parallel_size", "max_num_seqs", "speculative", "enforce_eager"} < reaching.keys()
    same = {name for name, given in reaching.items() if key_of(given) == key_of(plain)}
    assert same == NO_CONSTANTS.keys()
    fused = plain | {"compilation_config": {"pass_config": {"fuse_allreduce_rms": True}}}
    assert key_of(fused) != key_of(plain | {"compilation_config": {"pass_config": {"fuse_allreduce_rms": False}}})


def test_so_has_what_follows_from_the_model(moe_folder: str, key_of: Keys) -> None:
    """Dtype, length, settings in place of the folder's, the place in a group. Would not catch what two models share."""
    changes = ({"dtype": "float16"}, {"max_model_len": 128}, {"hf_overrides": {"rope_theta": 5.0}}, {"tp_rank": 1})
    keys = [key_of(arguments(moe_folder, **change)) for change in ({}, {"seed": 2}, *changes)]
    assert keys[0] == keys[1] and len(set(keys)) == 1 + len(changes)


def test_adapters_of_other_alphas_have_their_own_code(moe_folder: str, key_of: Keys) -> None:
    """Rank 32 with alpha 32 and 128, another rank, another linear; without `lora_scale` the first two keys are one.
    Would not catch a constant that the next test does not list.
    """
    plain, alphas = arguments(moe_folder), [LoraConfig(rank=32, alpha=alpha).scale for alpha in (32.0, 128.0)]
    given = [(32, alphas[0], Q_PROJ), (32, alphas[1], Q_PROJ), (64, alphas[0], Q_PROJ), (32, alphas[0], O_PROJ)]
    keys = [key_of(with_adapter(plain, *each)) for each in given]
    assert len({key_of(plain), *keys}) == 5 and key_of(with_adapter(plain, *given[0])) == keys[0]


def constants(scale: float) -> list[Any]:
    """Python numbers in torch's graph of a product with an adapter that is bound with this scale."""

    def add_lora_linear(y: torch.Tensor, x: torch.Tensor, a: Any, b: Any, scale: float) -> torch.Tensor:
        return y + x * scale

    wrapper, found = SimpleNamespace(add_lora_linear=add_lora_linear), []
    layer = SimpleNamespace(lora_a_stacked=(), lora_b_stacked=())
    manager = SimpleNamespace(
        modules={"q_proj": layer},
        packed_modules_mapping={"q_proj": []},
        punica_wrapper_mapping={"all": wrapper},
        lora_config=SimpleNamespace(max_lora_rank=8),
    )
    bind(SimpleNamespace(_adapter_manager=manager), Given({}, scale))

    def listing(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        found.extend(each for node in graph.graph.nodes for each in node.args if isinstance(each, int | float))
        return graph.forward

    torch._dynamo.reset()
    product = torch.compile(wrapper.add_lora_linear, backend=listing)
    assert product(torch.zeros(2), torch.ones(2), None, None, 1.0)[0] == scale
    return found


def test_the_scale_is_a_constant_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason why it is in the key: if this fails, it may leave. Would not catch a kernel that has its own."""
    monkeypatch.setattr(torch._dynamo.config, "disable", False)
    assert constants(1.0) != constants(4.0) == [4.0]


def test_what_engines_are_built_with_is_in_the_key() -> None:
    """Every parameter of a `using_...` of a change to vLLM has a place. Would not catch one that is read elsewhere."""
    found = {
        (name.removeprefix(VLLM), parameter)
        for name in modules_for("cuda")
        if name.startswith(VLLM)
        for each, function in vars(importlib.import_module(name)).items()
        if each.startswith("using_")
        for parameter in inspect.signature(function).parameters
    }
    assert found == OF_CONTEXTS.keys()


def test_gated_delta_rules_start_without_nvcc(moe_folder: str, vllm_config_of: Any, monkeypatch: Any) -> None:
    """vLLM takes Triton's kernels on a Hopper; its own choice is FlashInfer's. Would not catch other kernels."""
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as layer

    hopper = SimpleNamespace(
        is_rocm=lambda: False, is_cuda=lambda: True, is_device_capability=lambda capability: capability == 90
    )
    monkeypatch.setattr(layer, "current_platform", hopper)
    given = vllm_config_of(arguments(moe_folder))
    assert layer._resolve_gdn_prefill_backend(given)[1] == GATED_DELTA["gdn_prefill_backend"] == "triton"
    given.additional_config.pop("gdn_prefill_backend")
    assert layer._resolve_gdn_prefill_backend(given)[1] == "flashinfer"
