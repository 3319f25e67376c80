"""Attention for training: Megatron's self-attention with the rollout engine's weight layout, packed or padded.

Legend: S sequence, B batch, N query heads and K key/value heads of this TP rank, D head size. A packed row has B = 1
and S = T tokens of several segments.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from megatron_rl.device import has_grouped_attention, has_varlen_attention
from megatron_rl.model.block_attention import (
    PLAIN,
    AttentionKind,
    Facing,
    Pieces,
    cpu_flash_backward,
    cpu_flash_forward,
)
from megatron_rl.model.families import AttentionShape
from megatron_rl.model.joined_attention import KeyBlock, joined
from megatron_rl.model.norm import JointNorm, RMSNorm, bare_norm
from megatron_rl.model.parts import GroupedAttention
from megatron_rl.model.segments import PaddedRows, Segments, by_bucket, to_slots, to_tokens, turns_of

RowsAttention = Callable[[Tensor, Tensor, Tensor, AttentionKind, Tensor | None], Tensor]
"""See `attend`."""


class StackedQKVSelfAttention(SelfAttention):
    """Self-attention whose fused projection is stacked [q; k; v] per TP rank.

    Megatron interleaves q, k and v per query group; vLLM and Hugging Face stack them. Stacking here lets the rollout
    engine read the very same memory.

    shape: the model's variants of attention; None: plain. part: this layer's attention; None: that of Megatron's
    configuration. norm_after: the norm of the output, `post_layernorm`. turn_scale: factor of cosine and sine.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any,
        *args: Any,
        shape: AttentionShape | None = None,
        part: GroupedAttention | None = None,
        norm_after: type[RMSNorm] | None = None,
        turn_scale: float = 1.0,
        **options: Any,
    ) -> None:
        shares_keys = part is not None and part.values_are_keys
        if part is not None:
            config = copy.copy(config)  # one for all layers, whose heads may differ
            config.kv_channels, config.num_query_groups = part.head_size, part.num_kv_heads
        if shares_keys:
            columns = config.kv_channels * config.num_query_groups
            submodules = replace(submodules, linear_qkv=_without_values(submodules.linear_qkv, columns))
        super().__init__(config, submodules, *args, **options)
        self.shares_keys, self.norms_values = shares_keys, part is not None and part.value_norm
        self.turn_scale = turn_scale
        if part is not None and part.joint_norms:
            size, group = self.hidden_size_per_attention_head, self.tp_group
            self.q_layernorm = JointNorm(self.config, self.num_attention_heads_per_partition, size, group)
            self.k_layernorm = JointNorm(self.config, self.num_query_groups_per_partition, size, group)
        head_size = self.hidden_size_per_attention_head
        self.turned = head_size if shape is None or shape.wide is not None else shape.turned
        # With two rotary embeddings their angles are concatenated: first those of layers without a window.
        self.number_of_rope: int | None = None
        if shape is not None and shape.two_ropes:
            self.number_of_rope = int(shape.window(self.layer_number - 1) is not None)
            wide = shape.turned if shape.wide is None else shape.wide.size
            self.angles_of_ropes = [wide // 2, shape.turned // 2]
        self.post_layernorm: RMSNorm | None = None
        if norm_after is not None:
            self.post_layernorm = norm_after(self.config, self.config.hidden_size, self.config.layernorm_epsilon)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: Segments | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [S, B, H] (under sequence parallelism this rank's part of S) -> (the same shape, bias).

        rotary_pos_emb [longest, 1, 1, D]: the angles of every position; a packed row takes those of its positions. They
        are applied where q and k are made, because Megatron computes cosine and sine again for both in every layer.
        """
        self._turns = turns_of(rotary_pos_emb, packed_seq_params)
        if self.number_of_rope is not None:
            cosine, sine = (turn.split(self.angles_of_ropes, -1)[self.number_of_rope] for turn in self._turns)
            self._turns = (cosine, sine)
        out: tuple[Tensor, Tensor | None] = super().forward(
            hidden_states, attention_mask, rotary_pos_emb=None, packed_seq_params=packed_seq_params, **options
        )
        del self._turns  # they would outlive the pass
        if self.post_layernorm is None:
            return out
        return self.post_layernorm(out[0]), out[1]

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[Tensor, ...]:
        """hidden_states [S, B, H] -> query [S, B, N, D], key and value [S, B, K, D], and with `output_gate` a gate
        [S, B, N, D]; query and key are rotated.
        """
        if not split_qkv:
            raise NotImplementedError("unsplit attention has no stacked layout")
        mixed_qkv, _ = self.linear_qkv(hidden_states)
        head_size = self.hidden_size_per_attention_head
        num_q, num_kv = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
        of_values = [] if self.shares_keys else [num_kv]
        counts = [num_q, num_kv, *of_values]
        sizes = [num_q * head_size * (1 + output_gate), *(num_kv * head_size for _ in counts[1:])]
        query, key, *values = (
            part.reshape(*part.shape[:-1], num, -1)
            for part, num in zip(torch.split(mixed_qkv, sizes, dim=-1), counts, strict=True)
        )
        value = key if self.shares_keys else values[0]
        gates: list[Tensor] = []
        if output_gate:
            query, *gates = query.chunk(2, dim=-1)
        if self.norms_values:
            value = bare_norm(value, self.config.layernorm_epsilon)
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        cosine, sine = ((self.turn_scale * turn).to(query.dtype) for turn in self._turns)
        return self._turn(query, cosine, sine), self._turn(key, cosine, sine), value, *gates

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [S, B, N * D], gate [S, B, N, D] -> the shape of x."""
        out: Tensor = SigmoidGate.apply(x.view_as(gate), gate)
        return out.flatten(2)

    def _turn(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Rotate the first elements of each head of x [S, B, N, D]."""
        if self.turned == x.shape[-1]:
            whole: Tensor = RotaryTurn.apply(x, cosine, sine)
            return whole
        turning, still = x.split([self.turned, x.shape[-1] - self.turned], dim=-1)
        return torch.cat([RotaryTurn.apply(turning, cosine, sine), still], dim=-1)


class SigmoidGate(torch.autograd.Function):
    """x sigmoid(z). Only x and z are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return gate.sigmoid().mul_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        opened = gate.sigmoid()
        return grad * opened, torch.ops.aten.sigmoid_backward(grad * x, opened)


def _without_values(linear_qkv: Any, columns: int) -> Any:
    """A builder of the fused projection without the `columns` of its values."""

    def build(num_in: int, num_out: int, **options: Any) -> Any:
        return linear_qkv(num_in, num_out - columns, **options)

    return build


class BiasedRowParallelLinear(RowParallelLinear):
    """Megatron's linear cut by inputs, with a bias, though its configuration asks for none.

    With the configuration's biases experts could not be cut over TP ranks.
    """

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options | {"bias": True})


class RotaryTurn(torch.autograd.Function):
    """Rotary embedding (Su et al., arXiv:2104.09864): rotate x [S, B, N, D] by angles with the given cosine and sine
    [S, 1, 1, D / 2]. Elements i and i + D / 2 are a pair.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return turned(x, cosine, sine, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return turned(grad, cosine, sine, -1.0), None, None


def turned(x: Tensor, cosine: Tensor, sine: Tensor, direction: float) -> Tensor:
    """x rotated forward (1) or back (-1); other arguments: see `RotaryTurn`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = x.chunk(2, -1)
    out_first, out_second = out.chunk(2, -1)
    sine = sine * direction
    torch.mul(first, cosine, out=out_first).sub_(second * sine)
    torch.mul(second, cosine, out=out_second).add_(first * sine)
    return out


class CausalAttention(MegatronModule):
    """Causal core attention with torch's kernels; the same code on CPU and CUDA.

    Padded rows are aligned left, so the causal mask alone hides the padding on the right from every real position.
    shape: the model's variants of attention; None: plain. With sinks `sinks` [N] are the logits of this rank's heads.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: Any,
        shape: AttentionShape | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.kind, self.growth = PLAIN, 1.0
        if shape is not None:
            self.kind = AttentionKind(shape.soft_cap, shape.window(layer_number - 1))
            # Kernels scale by the head size; the query is scaled by the rest.
            self.growth = shape.scale * config.kv_channels**0.5
        self.rows: RowsAttention = attend
        self.shares_pieces = True
        self.sinks: torch.nn.Parameter | None = None
        if shape is not None and shape.sinks:
            num_heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.sinks = torch.nn.Parameter(torch.empty(num_heads, dtype=config.params_dtype))

    @property
    def needs_slots(self) -> bool:
        """Whether no device has a kernel for it, so that packed rows must have slots."""
        return self.kind.soft_cap is not None or self.sinks is not None

    @property
    def needs_prefix_slots(self) -> bool:
        """Whether a segment's slots must hold all of its prefix, so that no piece of it can be met apart."""
        return self.needs_slots or self.kind.window is not None or not self.shares_pieces

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: Segments | None = None,
        **unused: Any,
    ) -> Tensor:
        """query [S, B, N, D], key and value [S, B, K, D] -> [S, B, N * D]."""
        query = query if self.growth == 1.0 else query * self.growth
        if packed_seq_params is None or isinstance(packed_seq_params, PaddedRows):
            q_BSND, k_BSKD, v_BSKD = (x.transpose(0, 1) for x in (query, key, value))
            out_SBND = self.rows(q_BSND, k_BSKD, v_BSKD, self.kind, self.sinks).transpose(0, 1)
        else:
            heads = (query.squeeze(1), key.squeeze(1), value.squeeze(1))
            if has_varlen_attention(query) and not self.needs_slots:
                out = varlen(*heads, packed_seq_params, self.kind.window)
            else:
                out = bucketed(*heads, packed_seq_params, self.kind, self.sinks, self.rows)
            out_SBND = out[:, None]
        return out_SBND.flatten(2)


def attend(
    query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind = PLAIN, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention within each of B rows: query [B, S, N, D], key and value [B, S, K, D] -> [B, S, N, D].

    sinks: see `joined`.
    """
    num_rows, length = query.shape[:2]
    if kind.window is not None and kind.window >= length:
        kind = replace(kind, window=None)
    if kind != PLAIN or sinks is not None:
        rows = [KeyBlock(Facing.within((length,) * num_rows, query.device))]
        q, k, v = (x.flatten(0, 1) for x in (query, key, value))
        return joined(q, k, v, lambda source: rows, kind, sinks).view(query.shape)
    q_BNSD, k_BKSD, v_BKSD = (x.transpose(1, 2) for x in (query, key, value))
    grouped = q_BNSD.shape[1] != k_BKSD.shape[1]
    if grouped and not has_grouped_attention(query):
        copies, grouped = q_BNSD.shape[1] // k_BKSD.shape[1], False
        k_BKSD, v_BKSD = (x.repeat_interleave(copies, dim=1) for x in (k_BKSD, v_BKSD))
    return F.scaled_dot_product_attention(q_BNSD, k_BKSD, v_BKSD, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def bucketed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    kind: AttentionKind = PLAIN,
    sinks: Tensor | None = None,
    rows_attention: RowsAttention = attend,
) -> Tensor:
    """Causal attention within each segment, bucket by bucket: [T, N, D], [T, K, D] twice -> [T, N, D].

    Pieces of prefixes that are in no slots are blocks of their own. rows_attention: of a bucket.
    """
    if segments.pieces:
        blocks = [KeyBlock(Slots(segments))]
        for queries, keys in ((slice(*piece.queries), slice(*piece.keys)) for piece in segments.pieces):
            num_queries, num_keys = (Pieces((span.stop - span.start,), query.device) for span in (queries, keys))
            blocks.append(KeyBlock(Facing(num_queries, num_keys, causal=False), queries, keys))
        return joined(query, key, value, lambda source: blocks)
    rows = zip(*(to_slots(x, segments) for x in (query, key, value)), strict=True)
    return to_tokens([rows_attention(q, k, v, kind, sinks) for q, k, v in rows], segments)


class Slots:
    """The block of every token with the keys of its segment's slots, on torch's flash attention for CPUs."""

    def __init__(self, segments: Segments) -> None:
        self.segments = segments

    def forward(self, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> tuple[Tensor, Tensor]:
        """See `Facing.forward`; query [T, N, D], key and value [T, K, D]. kind: plain."""
        buckets = zip(*(to_slots(x, self.segments) for x in (query, key, value)), strict=True)
        outputs, log_sums = zip(*(cpu_flash_forward(*bucket, causal=True) for bucket in buckets), strict=True)
        return to_tokens(outputs, self.segments), to_tokens(log_sums, self.segments)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum: Tensor, kind: AttentionKind
    ) -> list[Tensor]:
        """See `Facing.backward`; gradients as precise as `log_sum`."""
        segments = self.segments
        assert segments.token_of_slot is not None and segments.slot_of_token is not None
        # Filler, and the queries of prefixes, have no gradient of their own.
        slots = grad.new_zeros(len(segments.token_of_slot), *grad.shape[1:])
        d_out = by_bucket(slots.index_copy_(0, segments.slot_of_token, grad), segments)
        kept = (to_slots(x, segments) for x in (query, key, value, out, log_sum))
        of_buckets = [cpu_flash_backward(*bucket, causal=True) for bucket in zip(d_out, *kept, strict=True)]
        totals = []
        for parts in zip(*of_buckets, strict=True):
            of_slots = torch.cat([part.flatten(0, 1) for part in parts])
            total = of_slots.index_select(0, segments.slot_of_token).to(log_sum.dtype)
            if segments.prefix_slots is not None and segments.prefix_tokens is not None:
                of_prefixes = of_slots.index_select(0, segments.prefix_slots)
                total.index_add_(0, segments.prefix_tokens, of_prefixes.to(log_sum.dtype))
            totals.append(total)
        return totals


def varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, window: int | None = None) -> Tensor:
    """Compute `bucketed` with torch's variable-length flash attention, which CUDA has for half precision."""
    # torch 2.11 takes fewer heads of keys by itself, and has no such option.
    options: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if takes(varlen_attn, "enable_gqa") else {}
    out = varlen_attn(
        query,
        key,
        value,
        segments.cu_seqlens_q,
        segments.cu_seqlens_kv,
        segments.max_seqlen_q,
        segments.max_seqlen_q,
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    assert isinstance(out, Tensor)  # it returns the log-sums too only if asked
    return out


@cache
def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name."""
    return name in signature(function).parameters
