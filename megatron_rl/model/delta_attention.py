"""Linear attention by the gated delta rule for training, with the rollout engine's weight layout.

Legend: S sequence, S' this rank's part of it under sequence parallelism (else S), B batch, H and N heads of keys and of
values of this TP rank, K and V sizes of their heads, M = 2 H K + N V channels of the convolution.

A TP rank has some heads of keys and the heads of values that belong to them, so nothing is exchanged between them. Rows
are computed one by one from a state of zeros: packed segments go through slots (`segments.py`), which begin with a
prefix, so state crosses no segment, and a prompt of several responses may be stored once. Context-parallel ranks, each
of which has some of the tokens, exchange them for whole sequences of some of the heads, and back. On CUDA it is the
same code, or flash-linear-attention's (`fused_kernels.py`): the kernels that come with vLLM have no backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_rl.config.megatron import LOCAL
from megatron_rl.model.context_segments import ContextSegments
from megatron_rl.model.delta_rule import DeltaCore, DeltaRule, HeadSizes, chunked_delta_rule
from megatron_rl.model.key_exchange import to_heads, to_own_tokens
from megatron_rl.model.parts import GatedDelta
from megatron_rl.model.segments import PaddedRows, Segments, to_slots, to_tokens
from megatron_rl.model.te_layers import linears_of


class ChannelWeights(torch.nn.Module):
    """The weight of a convolution over each channel's own tokens, [M, 1, width], of this rank's channels."""

    def __init__(self, config: TransformerConfig, channels: int, width: int) -> None:
        super().__init__()
        self.weight = of_this_rank(torch.empty(channels, 1, width, dtype=config.params_dtype))


class GatedNorm(torch.nn.Module):
    """RMS norm of each head's output, times silu of a gate. Every TP rank holds the weight [V]."""

    def __init__(self, config: TransformerConfig, size: int, tp_group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self.eps, self.tp_group = config.layernorm_epsilon, tp_group
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [..., V] -> the same shape."""
        # Ranks have different heads, so backward adds up what they find.
        weight: Tensor = copy_to_tensor_model_parallel_region(self.weight, group=self.tp_group)
        out: Tensor = NormTimesGate.apply(x, gate, weight, self.eps)
        return out


class NormTimesGate(torch.autograd.Function):
    """rms_norm(x) w silu(z) over the last dim, computed in float32. Only x, z and w are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        return norm_times_gate(x, gate, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = (kept.detach().requires_grad_() for kept in ctx.saved_tensors)
        with torch.enable_grad():
            out = norm_times_gate(x, gate, weight, ctx.eps)
        return (*torch.autograd.grad(out, (x, gate, weight), grad), None)


def norm_times_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `NormTimesGate`."""
    wide = x.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (weight.float() * normed * F.silu(gate.float())).to(x.dtype)


def of_this_rank(data: Tensor) -> torch.nn.Parameter:
    """A parameter of which every TP rank has other rows."""
    parameter = torch.nn.Parameter(data)
    vars(parameter).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)
    return parameter


class HeadWeights(NamedTuple):
    """The weights of some heads, and their sizes: channels of the convolution [M, 1, width], per head of values [N]."""

    conv: Tensor
    log_decay: Tensor
    dt_bias: Tensor
    sizes: HeadSizes


class GatedDeltaAttention(MegatronModule):
    """Replaces Megatron's self-attention in a layer of linear attention."""

    needs_slots = needs_prefix_slots = True
    """No kernel takes packed segments, and a state is made of all that comes before."""
    needs_whole = True
    """Context-parallel ranks read whole segments, whatever way attention to keys goes."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        delta: GatedDelta,
        pg_collection: ProcessGroupCollection,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.tp_group, self.interleaved = pg_collection.tp, delta.interleaved
        self.rule: DeltaRule = chunked_delta_rule
        ranks, dtype = self.tp_group.size(), config.params_dtype
        self.sizes = HeadSizes(delta.num_keys // ranks, delta.num_values // ranks, delta.key_size, delta.value_size)
        self.A_log = of_this_rank(torch.empty(self.sizes.num_values, dtype=dtype))
        self.dt_bias = of_this_rank(torch.empty(self.sizes.num_values, dtype=dtype))
        linears, hidden = linears_of(config.transformer_impl), config.hidden_size
        qkvz = delta.channels + delta.value_columns
        self.linear_qkvz = linears.cut_by_outputs(config, hidden, qkvz, self.tp_group)
        # Two columns a head: fewer than FP8 products take on a rank.
        self.linear_ba = linears_of(LOCAL).cut_by_outputs(config, hidden, 2 * delta.num_values, self.tp_group)
        self.conv = ChannelWeights(config, sum(self.sizes.sections), delta.width)
        self.norm = GatedNorm(config, delta.value_size, self.tp_group)
        self.linear_proj = linears.cut_by_inputs(config, delta.value_columns, hidden, self.tp_group)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Segments | None = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [S', B, hidden] -> (the same shape, None: no bias). Positions do not matter."""
        qkvz, _ = self.linear_qkvz(hidden_states)
        ba, _ = self.linear_ba(hidden_states)
        mixed, gate, b, a = self._by_head(qkvz, ba) if self.interleaved else self._by_section(qkvz, ba)
        if packed_seq_params is None or isinstance(packed_seq_params, PaddedRows):
            mixed, b, a = (x.transpose(0, 1) for x in (mixed, b, a))
            out = self._core(mixed, b, a, self._weights()).transpose(0, 1)
        else:
            gate = gate.contiguous()  # a view would keep the projections that slots are copies of
            tokens = [x.transpose(0, 1).flatten(0, 1) for x in (mixed, b, a)]
            if isinstance(packed_seq_params, ContextSegments) and packed_seq_params.group is not None:
                rows = self._of_shared(tokens, packed_seq_params, packed_seq_params.group)
            else:
                rows = self._of_segments(tokens, packed_seq_params, self._weights())
            out = rows.unflatten(0, (mixed.shape[1], -1)).transpose(0, 1)
        projected, _ = self.linear_proj(self.norm(out, gate).flatten(2))
        return projected, None

    def _of_segments(self, tokens: Sequence[Tensor], segments: Segments, weights: HeadWeights) -> Tensor:
        """tokens: `mixed` [T, M], `b` and `a` [T, N] -> [T, N, V]."""
        buckets = zip(*(to_slots(x, segments) for x in tokens), strict=True)
        return to_tokens([self._core(mixed, b, a, weights) for mixed, b, a in buckets], segments)

    def _of_shared(self, tokens: Sequence[Tensor], segments: ContextSegments, group: dist.ProcessGroup) -> Tensor:
        """`_of_segments`, where T are the tokens of this rank and the segments are those of all of a group."""
        order, back, size = segments.order, segments.back, group.size()
        assert order is not None and back is not None  # of a model that `needs_whole`
        mixed, b, a = tokens
        heads = to_heads((*mixed.split(self.sizes.sections, -1), b, a), back, group)
        shares = heads.split([x.shape[1] // size for x in tokens], -1)
        return to_own_tokens(self._of_segments(shares, segments, self._weights(group.rank(), size)), order, group)

    def _core(self, mixed: Tensor, b: Tensor, a: Tensor, weights: HeadWeights) -> Tensor:
        out: Tensor = DeltaCore.apply(mixed, b, a, *weights, self.rule)
        return out

    def _weights(self, share: int = 0, num_shares: int = 1) -> HeadWeights:
        """Weights of one of equal shares of this TP rank's heads, of which each context-parallel rank has one.

        Backward leaves zeros for the other shares: ranks add up their gradients as data-parallel ones do.
        """
        if num_shares == 1:
            return HeadWeights(self.conv.weight, self.A_log, self.dt_bias, self.sizes)
        channels = self.conv.weight.split(self.sizes.sections)
        log_decay, dt_bias = (x.chunk(num_shares)[share] for x in (self.A_log, self.dt_bias))
        conv = torch.cat([section.chunk(num_shares)[share] for section in channels])
        return HeadWeights(conv, log_decay, dt_bias, self.sizes.over(num_shares))

    def _by_section(self, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Projections stacked [q; k; v; z] and [b; a] -> mixed [S, B, M], gate [S, B, N, V], b and a [S, B, N]."""
        sizes = self.sizes
        columns = sum(sizes.sections)
        mixed, gate = qkvz.split([columns, qkvz.shape[-1] - columns], -1)
        b, a = ba.chunk(2, -1)
        return mixed, gate.unflatten(-1, (-1, sizes.value)), b, a

    def _by_head(self, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`_by_section` of projections that have [q; k; v; z] and [b; a] for each head of keys."""
        sizes = self.sizes
        values = sizes.num_values // sizes.num_keys
        by_head = qkvz.unflatten(-1, (sizes.num_keys, -1))
        *parts, gate = by_head.split([sizes.key, sizes.key, values * sizes.value, values * sizes.value], -1)
        b, a = ba.unflatten(-1, (sizes.num_keys, -1)).chunk(2, -1)
        mixed = torch.cat([part.flatten(-2) for part in parts], -1)
        return mixed, gate.unflatten(-1, (values, -1)).flatten(-3, -2), b.flatten(-2), a.flatten(-2)
