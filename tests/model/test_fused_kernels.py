"""FlexAttention for sinks, soft caps and windows beside tiles in float32. CPUs have its gradients uncompiled alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from megatron_rl.model.attention import attend, bucketed
from megatron_rl.model.block_attention import AttentionKind
from megatron_rl.model.fused_kernels import BLOCK, causal_blocks, flex_rows, seen_within
from megatron_rl.model.segments import Segments


@pytest.fixture(autouse=True)
def gradients_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses gradients there whatever computes them; uncompiled it has them."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)


def leaves(shape: tuple[int, ...], num_heads: int = 4, num_kv: int = 2, size: int = 16) -> list[torch.Tensor]:
    """Query, key, value and sinks."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((*shape, num_heads, size), (*shape, num_kv, size), (*shape, num_kv, size), (num_heads,))
    return [(2 * torch.randn(each, generator=generator)).requires_grad_() for each in shapes]


@pytest.mark.parametrize("kind", [AttentionKind(), AttentionKind(5.0), AttentionKind(5.0, 9), AttentionKind(None, 140)])
@pytest.mark.parametrize("has_sinks", [True, False])
def test_rows_and_their_gradients_are_those_of_tiles(kind: AttentionKind, has_sinks: bool) -> None:
    """Two rows of more than a block, grouped heads. Would not catch what a compiler makes of it."""
    given = leaves((2, BLOCK + 40))
    used = given if has_sinks else given[:3]
    results = []
    for rows in (attend, flex_rows):
        out = rows(*given[:3], kind, given[3] if has_sinks else None)
        results.append((out, *torch.autograd.grad(out, used, torch.cos(out.detach()))))
    for tiles, found in zip(*results, strict=True):
        assert (tiles - found).abs().max() < 2e-5 * max(1.0, float(tiles.abs().max()))


def test_packed_segments_go_through_it_bucket_by_bucket() -> None:
    """Three segments, two buckets. Would not catch a token of another segment that a mask hides anyway."""
    query, key, value, sinks = leaves((90,))
    segments, kind = Segments.of([50, 33, 7], torch.device("cpu")), AttentionKind(5.0, 20)
    expected = bucketed(query, key, value, segments, kind, sinks)
    assert len(segments.shapes) > 1
    assert (bucketed(query, key, value, segments, kind, sinks, flex_rows) - expected).abs().max() < 2e-5


@pytest.mark.parametrize("length", [1, BLOCK, 3 * BLOCK + 5])
@pytest.mark.parametrize("window", [None, 1, BLOCK, 2 * BLOCK + 1])
def test_blocks_are_those_that_torch_finds(length: int, window: int | None) -> None:
    """Those that are seen in part and whole, from every pair of tokens. Would not catch a kernel that reads others."""
    device = torch.device("cpu")
    made = causal_blocks(length, window, device)
    exact = flex.create_block_mask(seen_within(window), None, None, length, length, device=device)
    for kind in ("kv", "full_kv"):
        numbers, blocks = (getattr(exact, f"{kind}_{name}") for name in ("num_blocks", "indices"))
        counts, mine = (getattr(made, f"{kind}_{name}") for name in ("num_blocks", "indices"))
        assert torch.equal(counts, numbers) and counts.dtype == numbers.dtype and mine.dtype == blocks.dtype
        for row, count in enumerate(counts[0, 0].tolist()):
            assert set(mine[0, 0, row, :count].tolist()) == set(blocks[0, 0, row, :count].tolist())
    assert made.shape == exact.shape
