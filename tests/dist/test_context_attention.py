"""Attention over context-parallel ranks in its three ways: what it gives and its gradients are those of one rank."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]

WAYS = ("p2p", "all_gather", "a2a")
CASES = (((16, 8, 24), 1, 4, 2), ((8, 8), 1, 8, 1), ((16,), 3, 4, 4), ((16, 8), 1, 12, 3))
"""Lengths of a row's segments, rows, query and key/value heads: shared keys, one for all, padded rows, no divisor."""


KINDS = ((None, None), (1.5, None), (None, 3))
"""Soft caps and windows; with a window of 3 not every rank reads from every other."""


def differences(size: int) -> list[tuple[str, tuple[int, ...], float]]:
    """(way, numbers of case and kind, largest relative difference from attention on one rank) of output and gradients
    on this rank.
    """
    from megatron_rl.model.attention import bucketed
    from megatron_rl.model.block_attention import AttentionKind
    from megatron_rl.model.context_attention import context_attention
    from megatron_rl.model.context_segments import ContextSegments
    from megatron_rl.model.segments import Segments
    from megatron_rl.parallel.zigzag import zigzag_columns

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group, found = dist.new_group(list(range(size))), []
    for numbers in product(range(len(CASES)), range(len(KINDS))):
        row, num_rows, num_heads, num_kv = CASES[numbers[0]]
        kind = AttentionKind(*KINDS[numbers[1]])
        lengths = row * num_rows
        generator = torch.Generator().manual_seed(numbers[0])
        shapes = [(sum(lengths), n, 8) for n in (num_heads, num_kv, num_kv, num_heads)]
        *whole, grad = (torch.randn(shape, generator=generator) for shape in shapes)
        for x in whole:
            x.requires_grad_()
        expected = bucketed(*whole, Segments.of(lengths, torch.device("cpu")), kind)
        wanted = [expected, *torch.autograd.grad(expected, whole, grad)]
        mine = zigzag_columns(lengths, size, group.rank())
        columns = zigzag_columns(row, size, group.rank())
        for way in WAYS:
            leaves = [x[mine].detach().requires_grad_() for x in whole]
            segments = ContextSegments.cut(row, num_rows, columns, size, group)
            out = context_attention(*leaves, segments, way, kind)
            ours = [out, *torch.autograd.grad(out, leaves, grad[mine])]
            worst = max(float((a - b[mine]).abs().max() / b.abs().max()) for a, b in zip(ours, wanted, strict=True))
            found.append((way, numbers, worst))
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_every_way_equals_one_rank(size):
    """Would not catch what flash attention on CUDA does otherwise, nor two ways wrong alike with one rank's."""
    for found in run_ranks(size, differences, size):
        assert len(found) == len(WAYS) * len(CASES) * len(KINDS)
        assert [entry for entry in found if not entry[2] < 1e-5] == []
