"""Experts with biases and bounded gates, as gpt-oss has them (Agarwal et al., arXiv:2508.10925).

Legend: T tokens that reached this rank, E experts of this rank, H hidden size, F columns of an expert on this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_rl.device import in_one_copy
from megatron_rl.model.eight_bits import EightBitStack
from megatron_rl.model.experts import Linears, fits_grouped_mm, stack_linears

SLOPE, BOUND = 1.702, 7.0


class BoundedGate(torch.autograd.Function):
    """x [..., 2F], where gate g and value v take turns, -> g sigmoid(SLOPE g) (v + 1), [..., F].

    g is at most BOUND, v between -BOUND and BOUND. Only x is kept; backward computes the rest again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, value = x[..., ::2].clamp(max=BOUND), x[..., 1::2].clamp(-BOUND, BOUND)
        return torch.sigmoid(SLOPE * gate).mul_(gate).mul_(value.add_(1.0))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, value = x[..., ::2].clamp(max=BOUND), x[..., 1::2].clamp(-BOUND, BOUND)
        share = torch.sigmoid(SLOPE * gate)
        grad_x = torch.empty_like(x)
        # d g s(g) / dg = s + SLOPE g s (1 - s); beyond a bound nothing moves.
        slope = torch.addcmul(share, share * gate, 1.0 - share, value=SLOPE)
        torch.mul(slope.mul_(value.add_(1.0)), grad, out=grad_x[..., ::2])
        torch.mul(share.mul_(gate), grad, out=grad_x[..., 1::2])
        grad_x[..., ::2].masked_fill_(x[..., ::2] > BOUND, 0.0)
        grad_x[..., 1::2].masked_fill_(x[..., 1::2].abs() > BOUND, 0.0)
        return grad_x


class OwnBias(torch.autograd.Function):
    """The bias [E, F] of every token's expert, owner int64 [T] -> [T, F].

    The gradient of a bias is a sum over thousands of tokens. That of an index adds them one at a time, with atomics on
    GPUs; a product with the matrix of who owns what adds them in float32, and in one order.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, owner: Tensor) -> Tensor:
        ctx.save_for_backward(owner)
        ctx.num_experts = len(bias)
        return bias.index_select(0, owner)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (owner,) = ctx.saved_tensors
        owns = torch.arange(ctx.num_experts, device=owner.device)[:, None] == owner
        return owns.to(grad.dtype) @ grad, None


class BiasedExperts(MegatronModule):
    """The experts of this rank, stacked as vLLM stacks them.

    w13 [E, 2F, H] and w13_bias [E, 2F] have rows of gate and value interleaved; w2 [E, H, F]. Expert TP ranks return
    partial sums, so the first alone adds w2_bias [E, H]; the others hold zeros, which stay.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
    ) -> None:
        """name: the module's, which newer versions of Megatron pass."""
        super().__init__(config=config)
        self.eight_bits: Mapping[str, EightBitStack] | None = None
        group = pg_collection.expt_tp
        self.bias_share = float(group.rank() == 0)
        hidden, columns = config.hidden_size, config.moe_ffn_hidden_size // group.size()

        def parameter(*shape: int) -> torch.nn.Parameter:
            made = torch.nn.Parameter(torch.empty(num_local_experts, *shape, dtype=config.params_dtype))
            vars(made)["allreduce"] = False  # see `StackedExperts`
            return made

        self.w13 = parameter(2 * columns, hidden)
        self.w13_bias = parameter(2 * columns)
        self.w2 = parameter(hidden, columns)
        self.w2_bias = parameter(hidden)

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """tokens [T, H] sorted by expert, tokens_per_expert int64 [E], weights [T] -> ([T, H], None: no bias left)."""
        # Times 0 on the other ranks, and not left out: DDP waits for the gradient of every parameter.
        biases = (self.w13_bias, self.w2_bias * self.bias_share)
        if self.eight_bits is None and fits_grouped_mm(tokens, self.w13, self.w2):
            out = grouped_biased(tokens, tokens_per_expert, self.w13, self.w2, *biases)
        else:
            ups, downs = (stack_linears(self.eight_bits, name, getattr(self, name)) for name in ("w13", "w2"))
            out = biased_one_by_one(tokens, tokens_per_expert, ups, downs, *biases)
        return out * weights.unsqueeze(-1).to(tokens.dtype), None


def grouped_biased(
    tokens: Tensor, tokens_per_expert: Tensor, w13: Tensor, w2: Tensor, w13_bias: Tensor, w2_bias: Tensor
) -> Tensor:
    """Run all experts in two calls: [T, H] -> [T, H]."""
    # Megatron counts on the device, reads the counts for its splits, and passes what it read.
    sizes = {"ends": tokens_per_expert.cumsum(0).to(torch.int32), "counts": tokens_per_expert}
    (here,) = in_one_copy([sizes], tokens.device)
    owner = torch.repeat_interleave(here["counts"], output_size=len(tokens))
    mixed = F.grouped_mm(tokens, w13.transpose(1, 2), offs=here["ends"]) + OwnBias.apply(w13_bias, owner)
    gated = BoundedGate.apply(mixed)
    out: Tensor = F.grouped_mm(gated, w2.transpose(1, 2), offs=here["ends"]) + OwnBias.apply(w2_bias, owner)
    return out


def biased_one_by_one(
    tokens: Tensor, tokens_per_expert: Tensor, ups: Linears, downs: Linears, w13_bias: Tensor, w2_bias: Tensor
) -> Tensor:
    """Compute `grouped_biased` one expert after the other. ups, downs: the products of each expert."""
    # Unbound at once: indexing a stack makes a gradient as large as the stack, for each expert.
    biases = (w13_bias.unbind(), w2_bias.unbind())
    experts = zip(tokens.split(tokens_per_expert.tolist()), ups, downs, *biases, strict=True)
    return torch.cat([down(BoundedGate.apply(up(x, bias=a)), bias=b) for x, up, down, a, b in experts])
