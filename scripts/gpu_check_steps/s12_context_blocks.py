"""Attention block by block, of context-parallel ranks and of a trie, on one device: against whole segments."""

from __future__ import annotations

from typing import Any

import step_outcome
import torch
from models import both_ways


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """Four ranks' parts of whole segments, then a trie on one rank and on four."""
    _whole_segments(device, small, figures)
    _trie(device, small, figures)


def _whole_segments(device: str, small: bool, figures: dict[str, Any]) -> None:
    """Outputs and gradients of four ranks, float32 and bfloat16: off by what share of the largest one in float32."""
    from megatron_rl.model.attention import bucketed, varlen
    from megatron_rl.model.context_segments import ContextSegments
    from megatron_rl.model.segments import Segments
    from megatron_rl.parallel.zigzag import zigzag_columns

    lengths = (64, 16, 128) if small else (4096, 512, 16384, 8)
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(sum(lengths), num_heads, 64) for num_heads in (8, 2, 2, 8)]
    given = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
    whole = Segments.of(lengths, torch.device(device))
    tokens = [zigzag_columns(lengths, 4, rank).to(device) for rank in range(4)]
    shares = [ContextSegments.cut(lengths, 1, mine, 4) for mine in tokens]
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.03)):
        query, key, value, grad = (x.to(dtype) for x in given)
        expected = both_ways(
            lambda q, k, v: bucketed(q, k, v, whole), [x.float() for x in (query, key, value)], grad.float()
        )
        found = in_blocks([query, key, value], grad, shares, tokens)
        errors = [float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)]
        name = str(dtype).removeprefix("torch.")
        figures[name] = " ".join(f"{error:.1e}" for error in errors)
        if device == "cuda" and dtype == torch.bfloat16:
            kernel = varlen(query, key, value, whole)
            figures["one kernel"] = f"{float((kernel.float() - expected[0]).abs().max() / expected[0].abs().max()):.1e}"
        assert max(errors) < bound, f"{name}: off by {errors}"


def _trie(device: str, small: bool, figures: dict[str, Any]) -> None:
    """Outputs and gradients of rows that branch twice, block by block, against whole rows in float32."""
    from megatron_rl.model.attention import bucketed
    from megatron_rl.model.context_segments import TrieSegments
    from megatron_rl.model.segments import Segments
    from megatron_rl.parallel.zigzag import chunk_ranges

    unit = 8 if small else 512
    # A row of 8 units, two that leave it after 4, one that leaves the last of these after 1 of its own, and filler.
    lengths, sizes = [8 * unit, 3 * unit, 2 * unit, 2 * unit, unit], [0, 4 * unit, 4 * unit, 5 * unit]
    start = torch.arange(4 * unit)
    prefixes = (torch.tensor(sizes), torch.cat([start, start, start, torch.arange(11 * unit, 12 * unit)]))
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(16 * unit, num_heads, 64) for num_heads in (8, 2, 2, 8)]
    given = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
    rows = Segments.on_host(lengths, prefixes)
    whole = rows.with_tensors({name: tensor.to(device) for name, tensor in rows.tensors().items()})
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.03)):
        query, key, value, grad = (x.to(dtype) for x in given)
        expected = both_ways(
            lambda q, k, v: bucketed(q, k, v, whole), [x.float() for x in (query, key, value)], grad.float()
        )
        for size in (1, 4):
            spans = [chunk_ranges(16 * unit, size, rank) for rank in range(size)]
            tokens = [torch.cat([torch.arange(*span) for span in of]).to(device) for of in spans]
            shares = [TrieSegments.share_of(lengths, prefixes, rank, size) for rank in range(size)]
            found = in_blocks([query, key, value], grad, shares, tokens)
            errors = [float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)]
            name = f"trie on {size}, {str(dtype).removeprefix('torch.')}"
            figures[name] = " ".join(f"{error:.1e}" for error in errors)
            assert max(errors) < bound, f"{name}: off by {errors}"


def in_blocks(
    given: list[torch.Tensor], grad: torch.Tensor, shares: list[Any], tokens: list[torch.Tensor]
) -> list[torch.Tensor]:
    """(output, gradients of query, key and value) put together from every rank's blocks, float32.

    shares: the segments of every rank; tokens: int64, which tokens it has.
    """
    from megatron_rl.model.block_attention import PLAIN
    from megatron_rl.model.joined_attention import Merged, taken

    query, key, value = given
    found = [torch.zeros(x.shape, device=x.device) for x in (query, *given)]
    for rank, (mine, segments) in enumerate(zip(tokens, shares, strict=True)):
        faced, q, merged = [], query[mine], Merged(query[mine])
        for source, theirs in enumerate(tokens):
            for facing, queries, keys in segments.blocks(rank, source, query.device):
                k, v = (taken(x[theirs], keys) for x in (key, value))
                part, log_sum = facing.forward(taken(q, queries), k, v, PLAIN)
                merged.add(part, log_sum, queries)
                faced.append((facing, queries, taken(theirs, keys), k, v))
        found[0][mine] = merged.out
        out = merged.out.to(query.dtype)
        for facing, queries, of_keys, k, v in faced:
            d_out, own, o, sums = (taken(x, queries) for x in (grad[mine], q, out, merged.log_sum))
            grads = facing.backward(d_out, own, k, v, o, sums, PLAIN)
            for total, rows, part in zip(found[1:], (taken(mine, queries), of_keys, of_keys), grads, strict=True):
                total.index_add_(0, rows, part.float())
    return found


if __name__ == "__main__":
    step_outcome.main(run)
