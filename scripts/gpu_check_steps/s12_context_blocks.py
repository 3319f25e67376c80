"""Attention as context-parallel ranks do it, block by block, on one device: against attention to whole segments."""

from __future__ import annotations

from typing import Any

import step
import torch


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """Outputs and gradients of four ranks, float32 and bfloat16: off by what share of the largest one in float32."""
    from megatron_rl.model.attention import bucketed, varlen
    from megatron_rl.model.segments import Segments

    lengths = (64, 16, 128) if small else (4096, 512, 16384, 8)
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(sum(lengths), num_heads, 64) for num_heads in (8, 2, 2, 8)]
    given = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
    whole = Segments.of(lengths, torch.device(device))
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.03)):
        query, key, value, grad = (x.to(dtype) for x in given)
        leaves = [x.float().requires_grad_() for x in (query, key, value)]
        exact = bucketed(*leaves, whole)
        expected = [exact.detach(), *torch.autograd.grad(exact, leaves, grad.float())]
        found = in_blocks([query, key, value], grad, lengths, size=4)
        errors = [float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)]
        name = str(dtype).removeprefix("torch.")
        figures[name] = " ".join(f"{error:.1e}" for error in errors)
        if device == "cuda" and dtype == torch.bfloat16:
            kernel = varlen(query, key, value, whole)
            figures["one kernel"] = f"{float((kernel.float() - expected[0]).abs().max() / expected[0].abs().max()):.1e}"
        assert max(errors) < bound, f"{name}: off by {errors}"


def in_blocks(given: list[torch.Tensor], grad: torch.Tensor, lengths: tuple[int, ...], size: int) -> list[torch.Tensor]:
    """(output, gradients of query, key and value) put together from every rank's blocks, float32."""
    from megatron_rl.model.block_attention import Merged, block_backward, block_forward
    from megatron_rl.model.context_attention import ContextSegments, taken
    from megatron_rl.parallel.zigzag import zigzag_columns

    query, key, value = given
    tokens = [zigzag_columns(lengths, size, rank).to(query.device) for rank in range(size)]
    found = [torch.zeros(x.shape, device=x.device) for x in (query, *given)]
    for rank, mine in enumerate(tokens):
        segments = ContextSegments.cut(lengths, 1, mine, size)
        faced, q, merged = [], query[mine], Merged(query[mine])
        for source, theirs in enumerate(tokens):
            facing, queries, keys = segments.facing(rank, source)
            k, v = (taken(x[theirs], keys) for x in (key, value))
            merged.add(*block_forward(taken(q, queries), k, v, facing), queries)
            faced.append((facing, queries, taken(theirs, keys), k, v))
        found[0][mine] = merged.out
        out = merged.out.to(query.dtype)
        for facing, queries, of_keys, k, v in faced:
            d_out, own, o, sums = (taken(x, queries) for x in (grad[mine], q, out, merged.log_sum))
            grads = block_backward(d_out, own, k, v, o, sums, facing)
            for total, rows, part in zip(found[1:], (taken(mine, queries), of_keys, of_keys), grads, strict=True):
                total.index_add_(0, rows, part.float())
    return found


if __name__ == "__main__":
    step.main(run)
