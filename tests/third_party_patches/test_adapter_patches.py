"""vLLM's LoRA: products of one adapter on CPUs, views of given tensors, experts without adapters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from third_party_patches.vllm import adapter_views, cpu_dense_adapters, experts_without_adapters

WIDTHS, RANK, INPUTS = (6, 4), 8, 5


def products(slots: list[int], monkeypatch, *, patched: bool) -> torch.Tensor:
    """What vLLM's CPU form adds for tokens of these adapters, -1 for none, to zeros [tokens, 10], times 2.5."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    monkeypatch.setattr(PunicaWrapperCPU, "add_lora_linear", PunicaWrapperCPU.add_lora_linear)  # undone at the end
    cpu_dense_adapters.apply()
    generator = torch.Generator().manual_seed(0)
    a = tuple(torch.randn(2, 1, RANK, INPUTS, generator=generator) for _ in WIDTHS)
    b = tuple(torch.randn(2, 1, width, RANK, generator=generator) for width in WIDTHS)
    x = torch.randn(len(slots), INPUTS, generator=generator)
    out = torch.zeros(len(slots), sum(WIDTHS))
    wrapper = SimpleNamespace(token_lora_indices=torch.tensor(slots))
    for name in (
        "add_shrink",
        "add_expand",
        "_apply_shrink",
        "_apply_expand",
        "_shrink_decode",
        "_expand_slice_decode",
    ):
        setattr(wrapper, name, getattr(PunicaWrapperCPU, name).__get__(wrapper))
    wrapper.is_prefill = False
    if not patched:
        monkeypatch.setattr(cpu_dense_adapters, "add_products", None)  # it must not be asked
    PunicaWrapperCPU.add_lora_linear(wrapper, out, x, a, b, 2.5, WIDTHS)
    expected = torch.zeros_like(out)
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected[row] = torch.cat(
                [2.5 * (up[slot, 0] @ (down[slot, 0] @ x[row])) for down, up in zip(a, b, strict=True)]
            )
    assert torch.allclose(out, expected, atol=1e-5)
    return out


@pytest.mark.parametrize("slots", [[1, 1, 1], [0], [-1, -1]])
def test_one_adapter_is_two_products(slots, monkeypatch):
    """Without a copy of A for each token, which vLLM's kernels would make. Would not catch other dtypes."""

    def copies(*args):
        raise AssertionError("vLLM's kernel copies A for every token")

    monkeypatch.setattr("vllm.lora.punica_wrapper.punica_cpu.bgmv_shrink", copies)
    found = products(slots, monkeypatch, patched=True)
    assert found.any() == (slots[0] >= 0)


def test_a_mixture_is_vllms_own(monkeypatch):
    """Tokens of two adapters. Would not catch a mixture with tokens of none, which vLLM's CPU kernel misreads."""
    products([0, 1, 1], monkeypatch, patched=False)


def test_buffers_are_views_that_nobody_writes():
    """Given tensors in place of buffers, zeros where none is given; a tensor without a layer is refused by name."""
    names = ("model.q_proj.lora_A", "model.q_proj.lora_B")
    given = dict(zip(names, (torch.ones(RANK, INPUTS), torch.ones(6, RANK)), strict=True))

    def made():
        layer = SimpleNamespace(
            lora_a_stacked=tuple(torch.zeros(1, 1, RANK, INPUTS) for _ in WIDTHS),
            lora_b_stacked=tuple(torch.zeros(1, 1, width, RANK) for width in WIDTHS),
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
        ({names[0]: torch.ones(4, INPUTS)}, r"q_proj.lora_A: vLLM expects \(\[1, 1, 8, 5\]"),
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
