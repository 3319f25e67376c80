"""Kernels that CUDA has and a CPU has not: which are chosen, and that what takes their place computes the same."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import _registry

from megatron_rl import device
from megatron_rl.device import choose_flash_attention
from megatron_rl.model import attention
from megatron_rl.model.log_probs import add_product_in_float32


@pytest.fixture
def hopper(monkeypatch):
    """A GPU of which only the compute capability is asked."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


@pytest.mark.parametrize(("is_installed", "chosen"), [(True, "FA3"), (False, None)])
def test_flash_attention_3_where_it_is_installed(monkeypatch, hopper, is_installed, chosen):
    """torch's own registry activates it, once. Would not catch a build of it that lacks a kernel."""
    activated = []
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", lambda *args, **options: activated.append("FA3"))
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_ACTIVE", None)
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: object() if is_installed else None)
    assert choose_flash_attention("cuda") == chosen and activated == [chosen] * (chosen is not None)
    assert choose_flash_attention("cpu") is None


def test_other_gpus_keep_torchs_own(monkeypatch):
    """FlashAttention 3 is written for Hopper. Would not catch a later one for other GPUs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert choose_flash_attention("cuda") is None


def test_keys_are_repeated_where_kernels_want_equal_heads(monkeypatch):
    """float32 on CUDA has a kernel without all scores for equal numbers of heads alone: outputs and gradients equal.

    Would not catch which kernel CUDA takes.
    """
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(2, 5, number, 8, generator=generator, requires_grad=True) for number in (4, 2, 2)]
    asked = []
    found = []
    for is_grouped in (True, False):
        monkeypatch.setattr(attention, "has_grouped_attention", lambda tensor, it=is_grouped: asked.append(it) or it)
        out = attention.attend(*heads)
        found.append((out, *torch.autograd.grad(out.square().sum(), heads)))
    assert asked == [True, False]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_products_with_a_float32_sum_have_the_overload_that_cuda_uses():
    """By shape on meta, and the CPU's form by hand. Would not catch a GPU's kernel that rounds the product."""
    total, left, right = torch.ones(3, 2), torch.full((3, 4), 0.5, dtype=torch.bfloat16), torch.eye(4, 2).bfloat16()
    add_product_in_float32(total, left, right)
    assert total.tolist() == [[1.5, 1.5]] * 3
    overload = torch.ops.aten.addmm.dtype_out
    names = [argument.name for argument in overload._schema.arguments]
    assert names[:4] == ["self", "mat1", "mat2", "out_dtype"] and names[-1] == "out"
