"""Multi-head latent attention for training (DeepSeek-V2, arXiv:2405.04434), with the rollout engine's weight layout.

Legend: S sequence, S' this rank's part of it under sequence parallelism (else S), B batch, N heads of this TP rank.
Sizes of a head and of the latent vectors: see `LatentAttention`.

The projections to latent vectors are whole on every TP rank, because vLLM has them so and shares the trainer's memory.
Under sequence parallelism only the short latent vectors are gathered. Keys and values are computed for every head, as
in transformers; generation caches the latent vectors alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_rl.device import has_varlen_attention
from megatron_rl.model.attention import RotaryTurn
from megatron_rl.model.context_attention import ContextAttention
from megatron_rl.model.context_segments import ContextSegments
from megatron_rl.model.families import LatentAttention
from megatron_rl.model.norm import RMSNorm
from megatron_rl.model.segments import Segments, turns_of
from megatron_rl.model.te_layers import linears_of


class LatentSelfAttention(MegatronModule):
    """Replaces Megatron's self-attention.

    growth: factor of the usual softmax scale. turn_scale: factor of cosine and sine.
    """

    needs_prefix_slots = True
    """torch's kernel that returns log-sums wants values as wide as keys."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        latent: LatentAttention,
        growth: float,
        turn_scale: float,
        pg_collection: ProcessGroupCollection,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.latent, self.growth, self.turn_scale, self.tp_group = latent, growth, turn_scale, pg_collection.tp
        hidden, heads, eps = config.hidden_size, config.num_attention_heads, config.layernorm_epsilon
        linears = linears_of(config.transformer_impl)
        self.linear_down = linears.whole(config, hidden, (latent.q_rank or 0) + latent.cached, self.tp_group)
        if latent.q_rank is None:
            self.linear_q = linears.cut_by_outputs(config, hidden, heads * latent.query, self.tp_group)
        else:
            self.q_layernorm = RMSNorm(config, latent.q_rank, eps)
            self.linear_q_up = linears.cut_by_outputs(config, latent.q_rank, heads * latent.query, self.tp_group)
        self.kv_layernorm = RMSNorm(config, latent.kv_rank, eps)
        self.linear_kv_up = linears.cut_by_outputs(
            config, latent.kv_rank, heads * (latent.nope + latent.value), self.tp_group
        )
        self.linear_proj = linears.cut_by_inputs(config, heads * latent.value, hidden, self.tp_group)
        self.core_attention = ContextAttention(config, layer_number, AttnMaskType.causal, "self")
        parts = config.recompute_modules if config.recompute_granularity == "selective" else None
        self.makes_core_again = "core_attn" in (parts or ())

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: Segments | None = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [S', B, H] -> (the same shape, None: no bias). rotary_pos_emb [longest, 1, 1, D]: angles."""
        query, key, value = self._heads(hidden_states, turns_of(rotary_pos_emb, packed_seq_params))
        attend = self._checkpointed if self.makes_core_again and self.training else self._attend
        out, _ = self.linear_proj(attend(query, key, value, packed_seq_params))
        return out, None

    def _heads(self, hidden_states: Tensor, turns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states [S', B, H] -> query and key [S, B, N, nope + rope], value [S, B, N, value]."""
        latent = self.latent
        down, _ = self.linear_down(hidden_states)
        q_latent, kv_latent, k_turning = down.split([latent.q_rank or 0, latent.kv_rank, latent.rope], dim=-1)
        if latent.q_rank is None:
            query, _ = self.linear_q(hidden_states)
        else:
            query, _ = self.linear_q_up(self.q_layernorm(q_latent))
        up, _ = self.linear_kv_up(self.kv_layernorm(kv_latent))
        k_still, value = _by_head(up, latent.nope + latent.value).split([latent.nope, latent.value], dim=-1)
        q_still, q_turning = _by_head(query, latent.query).split([latent.nope, latent.rope], dim=-1)
        cosine, sine = (self.turn_scale * turn for turn in turns)
        k_turned = _turned(self._for_all_heads(k_turning).unsqueeze(2), cosine, sine)
        key = torch.cat([k_still, k_turned.expand(*k_still.shape[:3], latent.rope)], dim=-1)
        query = torch.cat([q_still, _turned(q_turning, cosine, sine)], dim=-1)
        return (query if self.growth == 1.0 else query * self.growth), key, value

    def _for_all_heads(self, k_turning: Tensor) -> Tensor:
        """[S', B, rope] -> [S, B, rope]; its gradient is the sum over the heads of all TP ranks."""
        if self.config.sequence_parallel:
            gathered: Tensor = gather_from_sequence_parallel_region(k_turning, group=self.tp_group)
            return gathered
        copied: Tensor = copy_to_tensor_model_parallel_region(k_turning, group=self.tp_group)
        return copied

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments | None) -> Tensor:
        """Causal attention, [S, B, N * value]. Values are padded to the width of keys for CUDA's kernel and for
        exchanges of both between context-parallel ranks.
        """
        is_cut = isinstance(segments, ContextSegments)
        if segments is None or not (is_cut or has_varlen_attention(query)):
            usual: Tensor = self.core_attention(query, key, value, None, packed_seq_params=segments)
            return usual
        wide = F.pad(value, (0, self.latent.query - self.latent.value))
        out: Tensor = self.core_attention(query, key, wide, None, packed_seq_params=segments)
        narrow: Tensor = _by_head(out, self.latent.query)[..., : self.latent.value].flatten(2)
        return narrow

    def _checkpointed(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments | None) -> Tensor:
        """`_attend`, computed again in backward."""

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self._attend(query, key, value, segments)

        out: Tensor = tensor_parallel.checkpoint(attend, False, query, key, value)
        return out


def _by_head(x: Tensor, size: int) -> Tensor:
    """[S, B, N * size] -> [S, B, N, size]."""
    by_head: Tensor = x.unflatten(-1, (-1, size))
    return by_head


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate x [S, B, N, rope], where elements 2i and 2i + 1 are a pair. The result has the first elements of all pairs
    first, which changes no product of a query with a key.
    """
    halves = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
    turned: Tensor = RotaryTurn.apply(halves, cosine.to(x.dtype), sine.to(x.dtype))
    return turned
