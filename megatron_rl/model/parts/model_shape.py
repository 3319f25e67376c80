"""The sizes of one model under one set of names for all families."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """The sizes of one model. ffn_size: columns of the dense MLP, or of one expert.

    num_experts to dense_ffn_size are for models with experts: `dense_ffn_size` are the columns of the MLPs of
    `dense_layers`, `shared_size` those of the shared experts. qkv_bias, qk_norm: config.json asks for them (see
    `Family`). attention: what the family's `AttentionKeys` have read; None: plain attention.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_size: int
    vocab_size: int
    tied: bool
    num_experts: int = 0
    experts_per_token: int = 0
    shared_size: int = 0
    dense_layers: tuple[int, ...] = ()
    dense_ffn_size: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False
    attention: object = None

    @property
    def num_routed_layers(self) -> int:
        """Number of layers that have experts; 0 in a dense model."""
        return self.num_layers - len(self.dense_layers) if self.num_experts else 0
