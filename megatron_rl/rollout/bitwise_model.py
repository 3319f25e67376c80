"""vLLM's model on CPUs with the trainer's arithmetic, `model/bitwise.py`: log-probs are equal to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from megatron_rl.model.attention import turned
from megatron_rl.model.bitwise import KEYS, TILE, added, attention, gated, linear
from megatron_rl.model.norm import CpuNorm


def compute_bitwise(model: torch.nn.Module, frequencies: Tensor, adapter_scale: float) -> None:
    """Replace the arithmetic of vLLM's model with plain attention, before its first step.

    frequencies: the trainer's of the rotary embedding, float32 [D / 2]. adapter_scale: of adapters' products.
    """
    for module in model.modules():
        if punica := getattr(module, "punica_wrapper", None):
            punica.add_lora_linear = partial(_add_adapters, adapter_scale)
        if hasattr(module, "cpu_linear"):
            vars(module)["cpu_linear"] = linear
        if isinstance(router := getattr(module, "router", None), CPURouter):
            vars(router)["_compute_routing"] = MethodType(_routed, router)
        if kernel := getattr(getattr(module, "quant_method", None), "moe_kernel", None):
            kernel.fused_experts.products = gated, linear
        if isinstance(module, SiluAndMul):
            module.forward = gated
        elif isinstance(module, RMSNorm):
            module.forward = MethodType(_normed, module)
        elif isinstance(module, RotaryEmbedding):
            module.forward = _Rotation(module, frequencies)
        elif isinstance(module, Attention):
            module.impl.forward, module.impl.do_kv_cache_update = _PagedAttention(module.impl), _store


def _normed(norm: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """The trainer's norm of x, or of x plus a residual, and then the sum, too."""
    total = x if residual is None else x + residual
    out: Tensor = CpuNorm.apply(total, norm.weight, norm.variance_epsilon)
    return out if residual is None else (out, total)


def _routed(
    router: Any, hidden_states: Tensor, router_logits: Tensor, indices_type: torch.dtype | None, **unused: Any
) -> tuple[Tensor, Tensor]:
    """Weights float32 and ids int32 [T, K] of the experts of each token, in Megatron's order of softmax and choice."""
    scores = router_logits if router.renormalize else router_logits.softmax(-1)
    best, ids = scores.topk(router.top_k, -1)
    return best.softmax(-1) if router.renormalize else best, ids.to(torch.int32)


class _Rotation:
    """The trainer's rotation of queries and keys [T, heads * D] by the angles of their positions."""

    def __init__(self, embedding: Any, frequencies: Tensor) -> None:
        angles = torch.outer(torch.arange(len(embedding.cos_sin_cache), dtype=torch.float32), frequencies)
        self.cosine, self.sine = angles.cos()[:, None], angles.sin()[:, None]
        self.head_size = embedding.head_size

    def __call__(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        cosine, sine = self.cosine[positions], self.sine[positions]

        def turn(x: Tensor) -> Tensor:
            return turned(x.reshape(len(positions), -1, self.head_size), cosine, sine, 1.0).view(x.shape)

        return turn(query), None if key is None else turn(key)


def _add_adapters(
    factor: float,
    out: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    scale: float,
    output_slices: Sequence[int],
    **unused: Any,
) -> None:
    """Add the products of the one adapter to out [T, O]. lora_a, lora_b: A and B by projection, [1, 1, ...]."""
    starts = [0, *accumulate(output_slices)][:-1]
    added(out, x, starts, scale * factor, [(down[0, 0], up[0, 0]) for down, up in zip(lora_a, lora_b, strict=True)])


def _store(layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write keys and values [T, K, D] to their slots of kv_cache [blocks, K, block size, 2 D], end to end."""
    slots, size = slot_mapping, kv_cache.shape[2]
    kv_cache[slots // size, :, slots % size] = torch.cat([key, value], -1)


class _PagedAttention:
    """Attention of an engine step to keys in the cache, where `_store` has put them."""

    def __init__(self, impl: Any) -> None:
        self.scale = impl.scale

    def __call__(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        **unused: Any,
    ) -> Tensor:
        """query [T, N, D], key and value [T, K, D], kv_cache [blocks, K, block size, 2 D] -> output [T, N, D]."""
        if attn_metadata is None:  # vLLM measures its own memory
            return output
        ends, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
        for row, length in enumerate(lengths):
            own = slice(ends[row], ends[row + 1])
            output[own] = self._of_request(query[own], kv_cache, attn_metadata.block_table[row], length)
        return output

    def _of_request(self, query: Tensor, kv_cache: Tensor, blocks: Tensor, length: int) -> Tensor:
        """Queries [t, N, D] of a request's last tokens -> the same shape. length: the request's tokens so far."""
        num_queries, block_size = len(query), kv_cache.shape[2]
        pages = kv_cache[blocks[: -(-length // block_size)].long()].transpose(1, 2).flatten(0, 1)[:length]
        keys, values = F.pad(pages, (0, 0, 0, 0, 0, -length % KEYS)).chunk(2, -1)
        tiles = F.pad(query * self.scale, (0, 0, 0, 0, 0, -num_queries % TILE)).unflatten(0, (-1, TILE))
        first = torch.arange(length - num_queries, length, TILE)
        many = (len(tiles), *keys.shape)
        out = attention(tiles, keys[None].expand(many), values[None].expand(many), first)
        return out.flatten(0, 1)[:num_queries]
