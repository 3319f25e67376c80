"""vLLM's LoRA: products of one adapter on CPUs, views of given tensors, experts without adapters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from third_party_patches.vllm import adapter_views, cpu_dense_adapters, experts_without_adapters

WIDTHS, RANK, INPUTS = (6, 4), 8, 5


def products(slots: list[int], monkeypatch) -> torch.Tensor:
    """What vLLM's CPU form adds for tokens of these adapters, -1 for none, to zeros [tokens, 10], times 2.5."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    monkeypatch.setattr(PunicaWrapperCPU, "add_lora_linear", PunicaWrapperCPU.add_lora_linear)  # undone at the end
    cpu_dense_adapters.apply()
    generator = torch.Generator().manual_seed(0)
    a = tuple(torch.randn(2, 1, RANK, INPUTS, generator=generator) for _ in WIDTHS)
    b = tuple(torch.randn(2, 1, width, RANK, generator=generator) for width in WIDTHS)
    x = torch.randn(len(slots), INPUTS, generator=generator)
    out = torch.zeros(len(slots), sum(WIDTHS))
    wrapper = SimpleNamespace(token_lora_indices=torch.tensor(slots, dtype=torch.long))
    PunicaWrapperCPU.add_lora_linear(wrapper, out, x, a, b, 2.5, WIDTHS)
    expected = torch.zeros_like(out)
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected[row] = torch.cat(
                [2.5 * (up[slot, 0] @ (down[slot, 0] @ x[row])) for down, up in zip(a, b, strict=True)]
            )
    assert torch.allclose(out, expected, atol=1e-5)
    return out


@pytest.mark.parametrize("slots", [[1, 1, 1], [0], [-1, -1], [0, 1, -1, 1], []])
def test_an_adapter_is_two_products_of_its_tokens(slots, monkeypatch):
    """Without a copy of A for each token, which vLLM's kernels would make. Would not catch other dtypes."""

    def copies(*args):
        raise AssertionError("vLLM's kernel copies A for every token")

    monkeypatch.setattr("vllm.lora.punica_wrapper.punica_cpu.bgmv_shrink", copies)
    sums = products(slots, monkeypatch)
    assert sums.any() == any(slot >= 0 for slot in slots)


def test_vllms_own_kernel_misreads_no_adapter(monkeypatch):
    """The reason why a mixture is not left to it: tokens of two adapters are right, and one of none gets the last one.
    Would not catch an operator that nothing here calls.
    """
    from vllm.lora.ops.torch_ops import bgmv_expand, bgmv_shrink

    a, b, x = torch.ones(2, 1, 4), torch.ones(2, 6, 1), torch.ones(3, 4)
    for slots, added in (([0, 1, 1], [4.0, 4.0, 4.0]), ([0, 1, -1], [4.0, 4.0, 4.0])):
        lower, out = torch.zeros(3, 1), torch.zeros(3, 6)
        bgmv_shrink(x, a, lower, torch.tensor(slots), 1.0)
        bgmv_expand(lower, b, out, torch.tensor(slots), add_inputs=True)
        assert out[:, 0].tolist() == added


def test_buffers_are_views_that_nobody_writes():
    """Given tensors in place of buffers, zeros where none is given; a tensor without a layer is refused by name."""
    names = ("model.q_proj.lora_A", "model.q_proj.lora_B")
    given = dict(zip(names, (torch.ones(2, RANK, INPUTS), torch.ones(2, 6, RANK)), strict=True))

    def made():
        layer = SimpleNamespace(
            lora_a_stacked=tuple(torch.zeros(2, 1, RANK, INPUTS) for _ in WIDTHS),
            lora_b_stacked=tuple(torch.zeros(2, 1, width, RANK) for width in WIDTHS),
        )
        wrapper = SimpleNamespace(add_lora_linear=lambda y, x, a, b, scale, slices: scale)
        manager = SimpleNamespace(
            modules={"model.qk_proj": layer},
            packed_modules_mapping={"qk_proj": ["q_proj", "k_proj"]},
            punica_wrapper_mapping={"all": wrapper},
            lora_config=SimpleNamespace(max_lora_rank=RANK),
        )
        return layer, wrapper, SimpleNamespace(_adapter_manager=manager)

    layer, wrapper, worker = made()
    adapter_views.bind(worker, adapter_views.Given(given, 2.5))
    assert layer.lora_a_stacked[0].data_ptr() == given[names[0]].data_ptr()
    assert layer.lora_b_stacked[0].data_ptr() == given[names[1]].data_ptr()
    assert not layer.lora_a_stacked[1].any() and not layer.lora_b_stacked[1].any()
    layer.set_lora(0, torch.zeros(1), torch.zeros(1))
    layer.reset_lora(0)
    assert given[names[0]].all() and given[names[1]].all()
    assert wrapper.add_lora_linear(None, None, None, None, 1.0, ()) == 2.5
    assert worker._load_adapter(SimpleNamespace(lora_int_id=3)).id == 3
    for changes, named in (
        ({"model.o_proj.lora_A": given[names[0]]}, "no LoRA layer for .*o_proj"),
        ({names[0]: torch.ones(1, RANK, INPUTS)}, r"q_proj.lora_A: vLLM expects \(\[2, 1, 8, 5\]"),
    ):
        with pytest.raises(ValueError, match=named):
            adapter_views.bind(made()[2], adapter_views.Given(given | changes, 1.0))


@pytest.mark.parametrize(("targets", "has"), [(["q_proj"], False), (["q_proj", "experts"], True), (None, True)])
def test_experts_take_adapters_where_they_are_named(targets, has, monkeypatch):
    """As `FusedMoEConfig` says after it was made. Would not catch a choice of kernels that does not ask it."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    lora = SimpleNamespace(lora_config=SimpleNamespace(target_modules=targets))
    monkeypatch.setattr("vllm.config.get_current_vllm_config", lambda: lora)
    monkeypatch.setattr(FusedMoEConfig, "__post_init__", lambda self: None)
    experts_without_adapters.apply()
    config = FusedMoEConfig.__new__(FusedMoEConfig)
    config.is_lora_enabled = True
    config.__post_init__()
    assert config.is_lora_enabled == has


def test_kernels_of_experts_on_cpus_add_no_adapters():
    """The reason why adapters of experts are merged on CPUs: if this fails, vLLM can add them. Would not catch a kernel
    of another file.
    """
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsModular

    kernels = [each for each in vars(cpu_moe).values() if isinstance(each, type)]
    kernels = [
        each for each in kernels if issubclass(each, FusedMoEExpertsModular) and each.__module__ == cpu_moe.__name__
    ]
    assert kernels and not any(each.supports_lora() for each in kernels)


def test_latent_attention_multiplies_with_a_weight_without_its_adapter():
    """The reason why adapters of kv_b_proj are merged: vLLM reads the weight alone, whatever a layer around it adds. If
    this fails, vLLM may have one. Would not catch one that is added to the parts later.
    """
    from vllm.lora.layers import BaseLayerWithLoRA, ColumnParallelLinearWithLoRA
    from vllm.model_executor.layers.attention.mla_attention import split_kv_b_proj
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    base = torch.nn.Linear(4, 2 * (3 + 5), bias=False)
    base.quant_method = UnquantizedLinearMethod()
    layer = ColumnParallelLinearWithLoRA.__new__(ColumnParallelLinearWithLoRA)
    BaseLayerWithLoRA.__init__(layer)
    layer.base_layer = base
    layer.lora_a_stacked, layer.lora_b_stacked = (torch.ones(1, 1, 8, 4),), (torch.ones(1, 1, 16, 8),)
    keys, values = split_kv_b_proj(layer, torch.float32, 4, 2, 3, 5)
    assert torch.equal(torch.cat([keys, values], -1).flatten(1), base.weight.t())


def test_projections_of_the_gated_delta_rule_have_several_buffers():
    """The reason why they are merged: queries, keys and values of one B are three parts in vLLM, and A is there thrice.
    Would not catch a buffer for all of them next to these.
    """
    from vllm.lora.layers import MergedColumnParallelLinearWithLoRA

    layer = MergedColumnParallelLinearWithLoRA.__new__(MergedColumnParallelLinearWithLoRA)
    torch.nn.Module.__init__(layer)
    layer.output_sizes, layer.n_slices = [2, 2, 3, 4], 4
    a, b = torch.ones(RANK, INPUTS), torch.arange(7.0 * RANK).view(7, RANK)
    downs, ups = layer.expand_packed_lora([a, a], [b, torch.ones(4, RANK)])
    assert [len(each) for each in ups] == layer.output_sizes and torch.equal(torch.cat(ups[:3]), b)
    assert len(downs) == 4
