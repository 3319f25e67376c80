"""The gated delta rule (Yang et al., arXiv:2412.06464) in plain torch, with gradients, in float32.

A head has a state S [K, V] that begins as 0. For every token, with its decay g <= 0 and its rate b:

    S <- exp(g) S,    S <- S + k (b (v - S^T k))^T,    output S^T q

k and q have length 1, and q is scaled by K^-0.5. Chunks of C tokens are computed together. With G the sum of g from the
chunk's first token on, and S the state before the chunk, what the tokens write is U - W S, where

    (I + A) [U, W] = [b v, b exp(G) k],    A_ij = b_i exp(G_i - G_j) k_i . k_j for j < i, else 0

Legend: B rows of S tokens, H heads of keys, N heads of values of which each N / H share a head of keys, K and V sizes
of their heads, M channels of the convolution, n chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.model.parts.gated_delta import CHUNK

NORM_EPS = 1e-6
"""Added to the squared length of keys and queries, as in transformers and vLLM."""


DeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""See `chunked_delta_rule`."""


class HeadSizes(NamedTuple):
    """Heads of keys and of values on one rank, and elements of one of each."""

    num_keys: int
    num_values: int
    key: int
    value: int

    @property
    def sections(self) -> list[int]:
        """Channels of queries, of keys and of values."""
        return [self.num_keys * self.key, self.num_keys * self.key, self.num_values * self.value]

    def over(self, num_shares: int) -> HeadSizes:
        """Return the heads of one of equal shares."""
        return self._replace(num_keys=self.num_keys // num_shares, num_values=self.num_values // num_shares)


def causal_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve every channel over its own tokens: x [B, S, M], weight [M, 1, width] -> [B, S, M]; zeros come before."""
    width = weight.shape[-1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    out = padded[:, : x.shape[1]] * weight[:, 0, 0]
    for place in range(1, width):
        out = out + padded[:, place : place + x.shape[1]] * weight[:, 0, place]
    return out


def unit_length(x: Tensor) -> Tensor:
    """Scale the last dim to length 1."""
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def chunked_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
    """query, key [B, S, H, K], value [B, S, N, V], decay and rate [B, S, N] -> [B, S, N, V]; all float32.

    Tokens on the right of a row change nothing before them.
    """
    length = value.shape[1]
    size = min(CHUNK, length)
    q, k, v, g, b = (_in_chunks(x, size) for x in (query, key, value, decay[..., None], rate[..., None]))
    copies = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(copies, dim=1) for x in (unit_length(q) * q.shape[-1] ** -0.5, unit_length(k)))
    fading = decay_between(g)
    mixing = (b * (k @ k.transpose(-1, -2)) * fading).tril(-1)
    grown = g.cumsum(-2).exp()
    solved = torch.linalg.solve_triangular(
        mixing, torch.cat([b * v, b * grown * k], -1), upper=False, unitriangular=True
    )
    own, erased = solved.split([v.shape[-1], k.shape[-1]], -1)
    seen = (q @ k.transpose(-1, -2)) * fading
    left = fading[..., -1, :, None] * k
    state, outputs = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1]), []
    for number in range(v.shape[2]):
        written = own[:, :, number] - erased[:, :, number] @ state
        outputs.append((grown[:, :, number] * q[:, :, number]) @ state + seen[:, :, number] @ written)
        state = grown[:, :, number, -1:] * state + left[:, :, number].transpose(-1, -2) @ written
    return torch.stack(outputs, 2).flatten(2, 3)[:, :, :length].transpose(1, 2)


def decay_between(g: Tensor) -> Tensor:
    """exp(G_i - G_j) for j <= i, else 0: g [..., C, 1] -> [..., C, C].

    A difference of two sums that are large would lose the digits of a small one, so each is a sum of its own.
    """
    size = g.shape[-2]
    up_to = torch.ones(size, size, dtype=torch.bool, device=g.device).tril()
    sums = g.expand(*g.shape[:-1], size).masked_fill(~up_to.tril(-1), 0.0).cumsum(-2)
    return sums.masked_fill(~up_to, -torch.inf).exp()


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """[B, S, heads, elements] -> [B, heads, n, size, elements], filled up with zeros."""
    filled: Tensor = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size)).transpose(1, 2).unflatten(2, (-1, size))
    return filled


class DeltaCore(torch.autograd.Function):
    """Convolution, silu and the rule over B rows. Only inputs are kept; backward computes the rest again.

    mixed [B, S, M]: queries, keys and values of all heads; b, a [B, S, N]; weight [M, 1, width]; log_decay, dt_bias [N]
    -> [B, S, N, V] in the dtype of `mixed`. rule: `chunked_delta_rule`, or a kernel for it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        b: Tensor,
        a: Tensor,
        weight: Tensor,
        log_decay: Tensor,
        dt_bias: Tensor,
        sizes: HeadSizes,
        rule: DeltaRule = chunked_delta_rule,
    ) -> Tensor:
        ctx.save_for_backward(mixed, b, a, weight, log_decay, dt_bias)
        ctx.sizes, ctx.rule = sizes, rule
        return delta_core(mixed, b, a, weight, log_decay, dt_bias, sizes, rule)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[:6]
        inputs = [x.detach().requires_grad_(is_needed) for x, is_needed in zip(ctx.saved_tensors, needed, strict=True)]
        mixed, b, a, weight, log_decay, dt_bias = inputs
        with torch.enable_grad():
            out = delta_core(mixed, b, a, weight, log_decay, dt_bias, ctx.sizes, ctx.rule)
        gradients = iter(torch.autograd.grad(out, [x for x in inputs if x.requires_grad], grad))
        return (*(next(gradients) if is_needed else None for is_needed in needed), None, None)


def delta_core(
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    dt_bias: Tensor,
    sizes: HeadSizes,
    rule: DeltaRule = chunked_delta_rule,
) -> Tensor:
    """See `DeltaCore`."""
    convolved = F.silu(causal_convolution(mixed.float(), weight.float()))
    query, key, value = (
        part.unflatten(-1, (-1, size))
        for part, size in zip(convolved.split(sizes.sections, -1), (sizes.key, sizes.key, sizes.value), strict=True)
    )
    decay = -log_decay.float().exp() * F.softplus(a.float() + dt_bias.float())
    return rule(query, key, value, decay, b.float().sigmoid()).to(mixed.dtype)
