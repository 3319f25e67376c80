"""Attention for training: Megatron's self-attention with the rollout engine's weight layout.

Legend: S sequence, B batch, N query heads and K key/value heads of this TP rank, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


class StackedQKVSelfAttention(SelfAttention):
    """Self-attention whose fused projection is stacked [q; k; v] per TP rank.

    Megatron interleaves q, k and v per query group; vLLM and Hugging Face stack them. Stacking here lets the rollout
    engine read the very same memory.
    """

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states [S, B, H] -> query [S, B, N, D], key and value [S, B, K, D]."""
        if output_gate or not split_qkv:
            raise NotImplementedError("gated and unsplit attention have no stacked layout")
        mixed_qkv, _ = self.linear_qkv(hidden_states)
        head_size = self.hidden_size_per_attention_head
        num_q, num_kv = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
        sizes = [num_q * head_size, num_kv * head_size, num_kv * head_size]
        query, key, value = (
            part.reshape(*part.shape[:-1], -1, head_size) for part in torch.split(mixed_qkv, sizes, dim=-1)
        )
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value


class CausalAttention(MegatronModule):
    """Causal core attention on torch's `scaled_dot_product_attention`; the same code on CPU and CUDA.

    Rows are aligned left, so the causal mask alone keeps padding on the right out of every real position.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **unused) -> None:
        super().__init__(config=config)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **unused) -> Tensor:
        """query [S, B, N, D], key and value [S, B, K, D] -> [S, B, N * D]."""
        q_BNSD, k_BKSD, v_BKSD = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        grouped = q_BNSD.shape[1] != k_BKSD.shape[1]
        out_BNSD = F.scaled_dot_product_attention(q_BNSD, k_BKSD, v_BKSD, is_causal=True, enable_gqa=grouped)
        return out_BNSD.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)
