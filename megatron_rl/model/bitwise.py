"""Arithmetic whose result for a token has the same bits with any other tokens in its batch. On CPUs, in float32.

Kernels choose how they add by the shape of their input, so the log-probs of a token differ in their last bits between a
micro-batch and an engine step. Here every product has one shape: rows in tiles of `TILE`, the last one filled up with
zeros, and keys in blocks of `KEYS` that begin at the first position, added in this order. A block that a token does not
see adds zeros. The functions are those of both sides, so that training and generation agree to the last bit.

Trained modules keep Megatron's own backward: their output is replaced by that of the functions here, and its gradient
goes to the replaced output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_rl.model.attention import CausalAttention, attend
from megatron_rl.model.block_attention import AttentionKind
from megatron_rl.model.decoder import Chunk
from megatron_rl.model.eight_bits import SameGradient
from megatron_rl.model.experts import StackedExperts
from megatron_rl.model.mlp import SiluGate

TILE = 16
"""Rows of a product."""
KEYS = 32
"""Keys of a product in attention."""


def in_tiles(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function of rows to x [..., K], `TILE` rows at a time -> [..., N]."""
    rows = x.reshape(-1, x.shape[-1])
    filled = F.pad(rows, (0, 0, 0, -len(rows) % TILE))
    out = torch.cat([function(tile) for tile in filled.split(TILE)])[: len(rows)]
    return out.view(*x.shape[:-1], out.shape[-1])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K], plus bias [N] -> [..., N], without gradients."""
    product = in_tiles(lambda tile: torch.mm(tile, weight.t()), x)
    return product if bias is None else product + bias


def gated(x: Tensor) -> Tensor:
    """silu(a) * b of x [..., 2F] = [a; b] -> [..., F], without gradients."""
    return in_tiles(lambda tile: F.silu(tile[:, : tile.shape[1] // 2]) * tile[:, tile.shape[1] // 2 :], x)


def attention(query: Tensor, key: Tensor, value: Tensor, first: Tensor) -> Tensor:
    """Causal attention of tiles of queries, each to keys of its own: [t, TILE, N, D] -> the same shape, no gradients.

    query: scaled. key, value [t, n, K, D] from position 0 on, n a multiple of `KEYS`; those after a query are not read.
    first: int64 [t], the position of a tile's first query.
    """
    groups = query.shape[2] // key.shape[2]
    q = query.transpose(1, 2).flatten(0, 1)  # [t * N, TILE, D]
    blocks = [
        [part.transpose(1, 2).repeat_interleave(groups, 1).flatten(0, 1) for part in whole.split(KEYS, 1)]
        for whole in (key, value)
    ]
    rows = (first[:, None] + torch.arange(TILE)).repeat_interleave(query.shape[2], 0)  # [t * N, TILE]
    scores = []
    for number, keys in enumerate(blocks[0]):
        later = torch.arange(number * KEYS, (number + 1) * KEYS) > rows[..., None]
        scores.append(torch.bmm(q, keys.mT).masked_fill_(later, -torch.inf))
    largest = torch.stack([score.amax(-1) for score in scores]).amax(0)[..., None]
    total, out = torch.zeros_like(largest), torch.zeros_like(q)
    for score, values in zip(scores, blocks[1], strict=True):
        weights = score.sub_(largest).exp_()
        total += weights.sum(-1, keepdim=True)
        out += torch.bmm(weights, values)
    return out.div_(total).view(len(query), -1, TILE, query.shape[-1]).transpose(1, 2)


def rows_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention within each of B rows: query [B, S, N, D], key and value [B, S, K, D] -> [B, S, N, D]."""
    num_rows, length = query.shape[:2]
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, -length % size)) for x, size in ((query, TILE), (key, KEYS), (value, KEYS)))
    tiles = (q * query.shape[-1] ** -0.5).unflatten(1, (-1, TILE))
    first = torch.arange(0, q.shape[1], TILE)
    out = [attention(tiles[:, number], k, v, start.expand(num_rows)) for number, start in enumerate(first)]
    return torch.cat(out, 1)[:, :length]


def added(
    out: Tensor, x: Tensor, starts: Sequence[int], scale: float, pairs: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Add scale B (A x) of each projection to out [..., O], in place and without gradients.

    x [..., I]. starts: the first column of each in out. pairs: its A [r, I] and B [o, r].
    """
    for start, (down, up) in zip(starts, pairs, strict=True):
        out[..., start : start + len(up)] += scale * linear(linear(x, down), up)
    return out


def replaced(usual: Tensor, exact: Callable[[], Tensor]) -> Tensor:
    """Compute `exact` without gradients, and give it the gradient of `usual`."""
    with torch.no_grad():
        value = exact()
    out: Tensor = SameGradient.apply(usual, value)
    return out


def make_bitwise(chunk: Chunk, tp_group: dist.ProcessGroup) -> None:
    """Let a chunk of a model with plain attention compute with these functions. tp_group: its ranks."""
    for module in chunk.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            _multiply_in_tiles(module, tp_group)
        elif isinstance(module, MLP):
            _gate_in_tiles(module)
        elif isinstance(module, TopKRouter):
            _route_in_tiles(module)
        elif isinstance(module, StackedExperts):
            _run_in_tiles(module)
        elif isinstance(module, CausalAttention):
            module.rows, module.shares_pieces = _attend, False


def _multiply_in_tiles(module: Any, tp_group: dist.ProcessGroup) -> None:
    usual = module._forward_impl

    def forward(input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
        def exact() -> Tensor:
            whole = (
                gather_from_sequence_parallel_region(input, group=tp_group) if options["sequence_parallel"] else input
            )
            return linear(whole, weight, bias)

        return replaced(usual(input=input, weight=weight, bias=bias, **options), exact)

    def with_adapters(result: Tensor, out: Tensor, *given: Any) -> Tensor:
        return replaced(result, lambda: added(out.clone(), *given))

    module._forward_impl, module.added_in_tiles = forward, with_adapters


def _gate_in_tiles(mlp: Any) -> None:
    def forward(hidden_states: Tensor, **unused: Any) -> tuple[Tensor, None]:
        mixed, _ = mlp.linear_fc1(hidden_states)
        out, _ = mlp.linear_fc2(replaced(SiluGate.apply(mixed), lambda: gated(mixed)))
        return out, None

    mlp.forward = forward


def _route_in_tiles(router: Any) -> None:
    usual = router.gating
    router.gating = lambda x: replaced(usual(x), lambda: linear(x, router.weight))


def _run_in_tiles(experts: Any) -> None:
    usual = experts.forward

    def forward(tokens: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        def exact() -> Tensor:
            counts = tokens_per_expert.tolist()
            parts = zip(tokens.split(counts), weights.split(counts), experts.w13, experts.w2, strict=True)
            return torch.cat(
                [linear(gated(linear(mine, up)), down) * share[:, None] for mine, share, up, down in parts]
            )

        out, bias = usual(tokens, tokens_per_expert, weights)
        return replaced(out, exact), bias

    experts.forward = forward


def _attend(query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind, sinks: Tensor | None = None) -> Tensor:
    return replaced(attend(query, key, value, kind, sinks), lambda: rows_attention(query, key, value))
