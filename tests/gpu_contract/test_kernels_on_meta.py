"""Kernels that only CUDA has, as far as shapes and types go: torch's variable-length attention on the meta device."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.device import has_grouped_mm, has_varlen_attention
from megatron_rl.model import attention
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


def test_an_older_kernel_is_given_every_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without groups, as torch 2.11 has it: keys and values are repeated, each for its own queries.

    Would not catch another difference of that version.
    """
    given = []

    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
        given.append((key, value, window_size))
        return query

    monkeypatch.setattr(attention, "varlen_attn", older)
    heads = torch.arange(2.0)[None, :, None].expand(5, 2, 8)
    varlen(torch.zeros(5, 4, 8), heads, heads + 10, Segments.of([3, 2], torch.device("cpu")))
    [(key, value, window)] = given
    assert key[0, :, 0].tolist() == [0, 0, 1, 1] and value[4, :, 7].tolist() == [10, 10, 11, 11] and window == (-1, 0)


def test_which_kernels_a_tensor_has() -> None:
    """Of the CPU, by type; CUDA's half precision is known by its tensors only. Would not catch an old GPU."""
    types = (torch.float32, torch.float16, torch.bfloat16)
    assert [has_grouped_mm(torch.empty(1, dtype=dtype)) for dtype in types] == [False, False, True]
    assert not any(has_varlen_attention(torch.empty(1, dtype=dtype)) for dtype in types)
