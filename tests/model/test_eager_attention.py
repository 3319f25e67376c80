"""Attention with bounded products and windows, beside the same written out; and what else new families compute."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_rl.model import block_attention
from megatron_rl.model.attention import attend, bucketed
from megatron_rl.model.block_attention import AttentionKind
from megatron_rl.model.log_probs import VocabSoftmax, head_log_probs
from megatron_rl.model.mlp import GeluGate
from megatron_rl.model.norm import ZeroCentredNorm
from megatron_rl.model.segments import Segments


def written_out(query, key, value, soft_cap, window):
    """[B, S, N, D] and [B, S, K, D] twice, with every product at once."""
    groups = query.shape[2] // key.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (query, key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2)))
    scores = q @ k.transpose(-1, -2) * query.shape[-1] ** -0.5
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    at, of = torch.arange(query.shape[1])[:, None], torch.arange(query.shape[1])[None]
    unseen = (of > at) | (at - of >= (window or query.shape[1]))
    return (scores.masked_fill(unseen, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize(("soft_cap", "window"), [(1.5, None), (None, 3), (0.7, 5), (2.0, 99)])
@pytest.mark.parametrize("largest_tile", [40, 1 << 24])
def test_output_and_gradients(soft_cap, window, largest_tile, monkeypatch):
    """Of grouped heads, in one tile and in many: 1e-5. Would not catch half precision."""
    monkeypatch.setattr(block_attention, "LARGEST_TILE", largest_tile)
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(2, 11, heads, 8, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    upstream = torch.randn(2, 11, 4, 8, generator=generator)
    ours, expected = attend(*leaves, AttentionKind(soft_cap, window)), written_out(*leaves, soft_cap, window)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    found, wanted = (torch.autograd.grad((out * upstream).sum(), leaves) for out in (ours, expected))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_window_that_nothing_is_beyond_is_none():
    """Then the usual kernel does it. Would not catch a window that is one too long."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 6, 2, 8, generator=generator) for _ in range(3))
    assert torch.equal(attend(q, k, v, AttentionKind(window=6)), attend(q, k, v))
    assert not torch.equal(attend(q, k, v, AttentionKind(window=5)), attend(q, k, v))


def test_windows_of_segments_with_prefixes():
    """A prompt that lies in the row once is before its answers. Would not catch another kernel than the buckets'."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, 2, 8, generator=generator) for _ in range(3))
    segments = Segments.of([6, 3], torch.device("cpu"), [(0, 0), (0, 4)])
    out = bucketed(q, k, v, segments, AttentionKind(1.5, 3))
    second = torch.tensor([0, 1, 2, 3, 6, 7, 8])
    for rows, mine in ((torch.arange(6), slice(0, 6)), (second, slice(4, 7))):
        expected = written_out(*(x[rows][None] for x in (q, k, v)), 1.5, 3)[0]
        torch.testing.assert_close(out[rows][mine], expected[mine], atol=1e-5, rtol=1e-5)


def test_gelu_gate_by_its_formula():
    """Output and gradient in float64. Would not catch the exact gelu, which is another within 1e-3."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 10, generator=generator, dtype=torch.float64).requires_grad_()
    upstream = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    gate, up = x.chunk(2, -1)
    expected, ours = F.gelu(gate, approximate="tanh") * up, GeluGate.apply(x)
    assert torch.allclose(ours, expected, atol=1e-12) and not torch.allclose(ours, F.gelu(gate) * up, atol=1e-12)
    found, wanted = (torch.autograd.grad((out * upstream).sum(), x)[0] for out in (ours, expected))
    assert torch.allclose(found, wanted, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_centred_norm_by_its_formula(dtype):
    """A weight of bfloat16 that is small beside 1 is not lost. Would not catch another eps."""
    generator = torch.Generator().manual_seed(0)
    norm = ZeroCentredNorm(SimpleNamespace(params_dtype=dtype, sequence_parallel=False), 16, 1e-2)
    x = torch.randn(5, 16, generator=generator).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(1e-3 * torch.randn(16, generator=generator))
    wide = x.double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-2).rsqrt() * (1 + norm.weight.double())
    assert norm(x).dtype == dtype
    torch.testing.assert_close(norm(x), expected.to(dtype), atol=1e-6, rtol=1e-6)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_bounded_logits(alone):
    """Log-prob, entropy and gradients with a bound and a temperature, beside the same written out. One padded row.

    Would not catch a bound after the temperature at a temperature of 1, which this is not.
    """
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator).requires_grad_() for shape in ((6, 5), (8, 5)))
    targets = torch.tensor([0, 6, 3, 3, 1, 5])
    ours = head_log_probs(hidden, weight, targets, VocabSoftmax(7, 0.7, alone, soft_cap=1.2))
    log_probs = (1.2 * torch.tanh(hidden @ weight[:7].T / 1.2) / 0.7).log_softmax(-1)
    expected = (log_probs.gather(-1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1))
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    found, wanted = (torch.autograd.grad((out[0] - 0.3 * out[1]).sum(), (hidden, weight)) for out in (ours, expected))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
