"""Kernels that only CUDA has, as far as shapes and types go: torch's variable-length attention on the meta device."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.device import has_grouped_mm, has_varlen_attention
from megatron_rl.model.attention import varlen
from megatron_rl.model.segments import Segments


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (8, 2)])
def test_attention_within_segments_forward_and_backward(dtype: torch.dtype, num_heads: int, num_kv_heads: int) -> None:
    """Our call, with grouped heads, and its gradients. Would not catch a wrong number: the meta device has none."""
    tokens, head_size = 24, 64
    with torch.device("meta"):
        query = torch.empty(tokens, num_heads, head_size, dtype=dtype, requires_grad=True)
        key = torch.empty(tokens, num_kv_heads, head_size, dtype=dtype, requires_grad=True)
        value = torch.empty(tokens, num_kv_heads, head_size, dtype=dtype, requires_grad=True)
    segments = Segments.of([12, 5, 7], torch.device("meta"))
    out = varlen(query, key, value, segments)
    assert (out.shape, out.dtype) == (query.shape, dtype)
    out.sum().backward()
    for tensor in (query, key, value):
        assert tensor.grad is not None and (tensor.grad.shape, tensor.grad.dtype) == (tensor.shape, dtype)


def test_which_kernels_a_tensor_has() -> None:
    """Of the CPU, by type; CUDA's half precision is known by its tensors only. Would not catch an old GPU."""
    types = (torch.float32, torch.float16, torch.bfloat16)
    assert [has_grouped_mm(torch.empty(1, dtype=dtype)) for dtype in types] == [False, False, True]
    assert not any(has_varlen_attention(torch.empty(1, dtype=dtype)) for dtype in types)
