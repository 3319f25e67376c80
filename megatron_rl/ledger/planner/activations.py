"""Activations of a pipeline stage: bytes kept for backward, bytes held for a moment, and recomputation.

Numbers per token are those of the layers that `model/gpt.py` builds (own rotary embeddings and gates, no dropout, flash
attention). Which tensors autograd keeps was read off real layers, and a test compares the two.
Tokens are those of one micro-batch on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.model.families import AttentionShape, Family, LatentAttention, ModelShape, Routing

FP32 = 4
LARGEST_TILE = 1 << 24
"""Products of queries and keys that `model/shaped_attention.py` holds at the same time."""
CHUNKS_FORWARD, CHUNKS_BACKWARD = 2, 4
"""Number of tensors of the size of a float32 chunk of logits that the head's forward and backward hold."""


@dataclass(frozen=True)
class LayerBlock:
    """A micro-batch on one rank.

    tokens: packed or padded. slots: tokens in attention, which pads where no kernel takes segments of any length.
    response_tokens: scored tokens, whose logits are needed. longest: tokens of the longest segment.
    """

    tokens: int
    slots: int
    response_tokens: int
    is_packed: bool
    longest: int = 0


@dataclass(frozen=True)
class LayerSizes:
    """One decoder layer on one rank. hidden, q, kv, ffn: columns of this rank, that is elements per token.

    sequence_share: 1 / TP under sequence parallelism, which splits activations between the TP regions. routed: tokens
    that this rank's experts get per token of the micro-batch; 0 when dense. shared: columns of the shared experts' MLP.
    dense_share: share of the layers that have a dense MLP of `dense_ffn` columns instead of experts; one layer stands
    for all, so its MLP is the mean of both. norms_after: whether the outputs of attention and MLP are normalised.
    """

    hidden: int
    q: int
    kv: int
    num_heads: int
    num_kv_heads: int
    head: int
    ffn: int
    element: int
    sequence_share: float
    qk_norm: bool
    routed: float
    num_experts: int
    shared: int = 0
    shared_gate: bool = False
    dense_share: float = 0.0
    dense_ffn: int = 0
    latent: LatentAttention | None = None
    norms_after: bool = False
    attention: AttentionShape | None = None

    @classmethod
    def of(
        cls, family: Family, shape: ModelShape, routing: Routing | None, tp: int, etp: int, sp: bool, element: int
    ) -> LayerSizes:
        """Return a layer under TP `tp` and expert TP `etp`. Experts are assumed to be used evenly."""
        kv_heads = max(1, shape.num_kv_heads // tp)
        share = 1 / tp if sp and tp > 1 else 1.0
        return cls(
            hidden=shape.hidden_size,
            q=shape.num_heads // tp * shape.head_size,
            kv=kv_heads * shape.head_size,
            num_heads=shape.num_heads // tp,
            num_kv_heads=kv_heads,
            head=shape.head_size,
            ffn=shape.ffn_size // (etp if routing else tp),
            element=element,
            sequence_share=share,
            qk_norm=family.qk_norm or shape.qk_norm,
            routed=routing.experts_per_token * share * etp if routing else 0.0,
            num_experts=shape.num_experts,
            shared=shape.shared_size // tp,
            shared_gate=routing is not None and routing.shared_gate,
            dense_share=len(shape.dense_layers) / shape.num_layers,
            dense_ffn=shape.dense_ffn_size // tp,
            latent=shape.latent,
            norms_after=family.style.norms_after,
            attention=shape.attention,
        )

    def saved_bytes(self, block: LayerBlock) -> float:
        """Return the bytes that one layer keeps between forward and backward."""
        # A norm after attention or MLP keeps its input.
        norms = 2 if self.norms_after else 0
        residual = block.tokens * self.sequence_share * ((6 + norms) * self.hidden * self.element + (2 + norms) * FP32)
        return residual + self._attention_bytes(block) + self._mlp_bytes(block)

    def input_bytes(self, block: LayerBlock) -> float:
        """Return the bytes of a layer's input, which is all that full recomputation keeps of it."""
        return block.tokens * self.sequence_share * self.hidden * self.element

    def part_bytes(self, block: LayerBlock, part: str) -> float:
        """Return how many of `saved_bytes` are not kept where a part is recomputed: core_attn, mlp or moe."""
        if part != "core_attn":
            return self._mlp_bytes(block) if (part == "moe") == bool(self.routed) else 0.0
        statistics = block.slots * self.num_heads * FP32
        if not self._copies(block):
            return statistics + block.tokens * self.q * self.element  # its output: the next layer keeps a copy
        rows, inputs = block.slots * 2 * (self.q + self.kv), block.tokens * (self.q + 2 * self.kv)
        return statistics + (rows - inputs) * self.element

    def _latent_bytes(self, latent: LatentAttention, block: LayerBlock) -> float:
        """Return what latent attention keeps: latent vectors and their norms, queries, keys, values and the output."""
        ranks = (latent.q_rank or 0) + latent.kv_rank
        inner = block.tokens * self.sequence_share * ((2 * ranks + latent.rope) * self.element + 2 * FP32)
        value, up = self.num_heads * latent.value, self.num_heads * (latent.nope + latent.value)
        statistics = block.slots * self.num_heads * FP32
        if self._copies(block):
            return inner + statistics + (block.slots * (2 * self.q + 2 * value) + block.tokens * value) * self.element
        return inner + statistics + block.tokens * (2 * self.q + up + 2 * value) * self.element

    def _attention_bytes(self, block: LayerBlock) -> float:
        if self.latent is not None:
            return self._latent_bytes(self.latent, block)
        mixed, own = self.q + 2 * self.kv, 0.0
        statistics = block.slots * self.num_heads * FP32
        if self.qk_norm:
            own += block.tokens * (self.num_heads + self.num_kv_heads) * FP32
            # The float32 norm, which is our own on CPUs, keeps no copy of its input.
            own += block.tokens * (self.q + self.kv) * self.element if self.element != FP32 else 0
            own += block.tokens * mixed * self.element if block.slots != block.tokens or self._copies(block) else 0
        if self._copies(block):
            padded = block.slots * (2 * self.q + 2 * self.kv)
            return own + statistics + (block.tokens * self.q + padded) * self.element
        # Values are read where the fused projection wrote them.
        return own + statistics + block.tokens * (mixed + self.kv + 2 * self.q) * self.element

    def _copies(self, block: LayerBlock) -> bool:
        """Return whether attention works on padded copies of the rows."""
        return block.is_packed and self.element == FP32

    def _mlp_bytes(self, block: LayerBlock) -> float:
        if not self.routed:
            return 3 * self.ffn * block.tokens * self.element
        rows = block.tokens * self.routed
        own = block.tokens * self.sequence_share
        router = own * self.num_experts * (FP32 + 1) + rows * (8 + 8 + FP32)
        shared = 3 * self.shared * block.tokens + self.shared_gate * (self.hidden + 1) * own
        experts = (rows * (2 * self.hidden + 4 * self.ffn + 1) + shared) * self.element + router
        dense = 3 * self.dense_ffn * block.tokens * self.element
        return (1 - self.dense_share) * experts + self.dense_share * dense

    def transient_bytes(self, block: LayerBlock, *, backward: bool) -> float:
        """Return the bytes that one running layer holds for a moment: the widest step of the MLP or of attention."""
        # Our own gate of a dense MLP makes one tensor less than that of experts.
        ffn = self.ffn * block.tokens * (self.routed or 1)
        dense = max(self.shared, self.dense_ffn) * block.tokens * (3 + backward)
        at_gate = max(ffn * (4 + backward - (not self.routed)), dense)
        widest = max(at_gate, (self.q + 2 * self.kv) * block.slots * 3)
        return (widest + 2 * self.hidden * block.tokens) * self.element + self._products_bytes(block, backward)

    def _products_bytes(self, block: LayerBlock, backward: bool) -> float:
        """Return the bytes of products of queries and keys where no fused kernel runs; backward adds their
        gradients.
        """
        shape = self.attention
        if shape is None or shape.is_whole or (shape.soft_cap is None and self.element != FP32):
            return 0.0
        sizes = (block.longest if window is None else min(window, block.longest) for window in shape.windows or (None,))
        return min(LARGEST_TILE, block.slots * self.num_heads * max(sizes)) * FP32 * (1 + backward)


def in_flight(pp_size: int, pp_rank: int, vpp_size: int, num_micro_batches: int) -> int:
    """Return the most chunk passes whose activations a stage keeps: one-forward-one-backward (Narayanan et al.,
    arXiv:2104.04473), interleaved with several chunks.
    """
    total = num_micro_batches * vpp_size
    if vpp_size == 1:
        return min(pp_size - pp_rank, total)
    if num_micro_batches == pp_size:
        return total  # Megatron runs all forward passes first
    return min(2 * (pp_size - pp_rank - 1) + (vpp_size - 1) * pp_size + 1, total)


SELECTIVE = "selective"


@dataclass(frozen=True)
class Recompute:
    """One role's recomputed activations, as Megatron's transformer block reads the settings.

    method: uniform recomputes all layers of a chunk in groups of `num_layers`; block recomputes its first `num_layers`,
    one by one (Korthikanti et al., arXiv:2205.05198); None: no whole layers. parts: recomputed parts of all layers.
    """

    method: str | None = None
    num_layers: int = 0
    parts: tuple[str, ...] = ()

    @classmethod
    def of(cls, megatron: MegatronConfig) -> Recompute:
        """Read a configuration that has passed preflight."""
        override = megatron.override_transformer_config
        if override.recompute_granularity is None:
            return cls()
        if override.recompute_granularity == SELECTIVE:
            return cls(parts=tuple(override.recompute_modules or ("core_attn",)))
        return cls(override.recompute_method, override.recompute_num_layers or 0)

    def again(self, num_layers: int) -> int:
        """Return how many layers of a chunk of `num_layers` run twice."""
        if self.method is None:
            return 0
        return num_layers if self.method == "uniform" else min(self.num_layers, num_layers)

    def share(self, chunks: Sequence[int]) -> float:
        """Return the share of all layers that run twice, in chunks of these sizes."""
        return sum(map(self.again, chunks)) / sum(chunks)

    def part_bytes(self, layer: LayerSizes, block: LayerBlock) -> list[float]:
        """Return the bytes of one layer that each recomputed part does not keep."""
        return [layer.part_bytes(block, part) for part in self.parts]

    def share_of_layer(self, layer: LayerSizes) -> float:
        """Return the share of a layer's matrix products in recomputed parts; core attention counts as none."""
        mlp = 3 * layer.ffn * (layer.routed or 1)
        attention = 2 * (layer.q + layer.kv)
        return mlp / (mlp + attention) if ("moe" if layer.routed else "mlp") in self.parts else 0.0

    def kept_bytes(self, num_layers: int, input_bytes: float, saved_bytes: float) -> float:
        """Return the bytes that a pass through a chunk keeps between forward and backward.

        input_bytes, saved_bytes: of one layer, its input alone and all that its backward needs.
        """
        again = self.again(num_layers)
        run = self.num_layers if self.method == "uniform" else 1
        return again / run * input_bytes + (num_layers - again) * saved_bytes

    def made_bytes(self, num_layers: int, saved_bytes: float) -> float:
        """Return the most bytes that recomputing a group of layers for its backward adds.

        With method block the layers that are not recomputed run their backward first, so their memory is free by then.
        """
        again = self.again(num_layers)
        run = self.num_layers if self.method == "uniform" else min(1, again)
        return max(0, run - (num_layers - again)) * saved_bytes if again else 0.0
