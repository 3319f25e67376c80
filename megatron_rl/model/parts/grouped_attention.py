"""Attention with heads of queries that share heads of keys and values, in all its variants."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.model.parts.param_spec import ParamSpec, single, whole
from megatron_rl.model.parts.part import FP32, AttentionPart, Cut, LayerBlock
from megatron_rl.parallel.sharding import LogicalTensor, Segment

LARGEST_TILE = 1 << 24
"""Products of queries and keys that `model/shaped_attention.py` holds at the same time."""
BLOCK_SIZES = {"cpu": 32, "cuda": 16}
"""Tokens of one block of vLLM's cache, by device. The kernel on CPU accepts multiples of 32."""
CPU_HEAD_SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Elements of a head for which vLLM has kernels on CPU. vLLM's own list lacks 48, which it computes."""
CUDA_HEAD_MULTIPLE, CUDA_LARGEST_HEAD = 8, 256
"""FlashAttention's rule."""


@dataclass(frozen=True)
class AttentionShape:
    """One model's attention. scale: of products of queries and keys. soft_cap: their bound; None: no bound.

    windows: per layer the number of positions that a token attends to, including its own; None: all before it; (): no
    layer has a window. gated: what heads answer is scaled by a gate. turned: number of elements of a head that are
    rotated, from the first on. two_ropes: layers with a window have a rotary embedding of their own.
    """

    scale: float = 1.0
    turned: int = 0
    soft_cap: float | None = None
    windows: tuple[int | None, ...] = ()
    two_ropes: bool = False
    gated: bool = False

    def window(self, layer: int) -> int | None:
        """The window of one layer, counted over the whole model from 0."""
        return self.windows[layer] if self.windows else None

    @property
    def is_whole(self) -> bool:
        """Whether attention is plain: no bound and no window."""
        return self.soft_cap is None and not any(self.windows)


@dataclass(frozen=True)
class GroupedAttention(AttentionPart):
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245) of one layer.

    qkv_bias: q, k and v projections have biases. qk_norm: queries and keys are normalised per head. soft_cap: bound of
    products; None: none. window: positions that a token attends to, its own included; None: all before it. is_whole:
    no layer of the model has a bound or a window. gated: the projection of queries has beside each head a gate of its
    size, whose sigmoid scales what the head answers.
    """

    block_sizes = BLOCK_SIZES

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    qkv_bias: bool = False
    qk_norm: bool = False
    soft_cap: float | None = None
    window: int | None = None
    is_whole: bool = True
    gated: bool = False

    def params(self, mega: str, hf: str) -> dict[str, ParamSpec]:
        """Queries, keys and values are stacked in one matrix per TP rank, as vLLM has them."""
        hidden, heads, kv_heads, size = self.hidden, self.num_heads, self.num_kv_heads, self.head_size

        def qkv(kind: str, *columns: int) -> ParamSpec:
            rows = (("q", heads, size * (1 + self.gated)), ("k", kv_heads, size), ("v", kv_heads, size))
            parts = tuple(Segment(name, (num * each, *columns), num) for name, num, each in rows)
            names = tuple(f"{hf}self_attn.{part.name}_proj.{kind}" for part in parts)
            return ParamSpec(LogicalTensor(f"{hf}self_attn.qkv_proj.{kind}", parts, tp_dim=0), names)

        o_proj = Segment("columns", (hidden, heads * size), heads)
        params = {
            f"{mega}self_attention.linear_proj.weight": single(f"{hf}self_attn.o_proj.weight", o_proj, 1),
            f"{mega}self_attention.linear_qkv.weight": qkv("weight", hidden),
        }
        if self.qkv_bias:
            params[f"{mega}self_attention.linear_qkv.bias"] = qkv("bias")
        if self.qk_norm:
            for part in "qk":
                name = f"{mega}self_attention.{part}_layernorm.weight"
                params[name] = whole(f"{hf}self_attn.{part}_norm.weight", (size,))
        return params

    @property
    def token_elements(self) -> int:
        return self.hidden * ((2 + self.gated) * self.num_heads + 2 * self.num_kv_heads) * self.head_size

    @property
    def query_columns(self) -> int:
        return self.num_heads * self.head_size

    def _q(self, cut: Cut) -> int:
        return self.num_heads // cut.tp_size * self.head_size

    def _kv_heads(self, tp_size: int) -> int:
        """Heads on one rank: those of few heads are repeated."""
        return max(1, self.num_kv_heads // tp_size)

    def _kv(self, cut: Cut) -> int:
        return self._kv_heads(cut.tp_size) * self.head_size

    def kept_bytes(self, block: LayerBlock, cut: Cut) -> float:
        q, kv, element, copies = self._q(cut), self._kv(cut), cut.element, cut.copies(block)
        mixed, own = q + 2 * kv, 0.0
        statistics = block.slots * (self.num_heads // cut.tp_size) * FP32
        if self.qk_norm:
            own += block.tokens * (self.num_heads // cut.tp_size + self._kv_heads(cut.tp_size)) * FP32
            # The float32 norm, which is our own on CPUs, keeps no copy of its input.
            own += block.tokens * (q + kv) * element if element != FP32 else 0
            own += block.tokens * mixed * element if block.slots != block.tokens or copies else 0
        # The gates, and what they scale.
        own += 2 * self.gated * block.tokens * q * element
        if copies:
            return own + statistics + (block.tokens * q + block.slots * (2 * q + 2 * kv)) * element
        # Values are read where the fused projection wrote them.
        return own + statistics + block.tokens * (mixed + kv + 2 * q) * element

    def again_bytes(self, block: LayerBlock, cut: Cut, module: str) -> float:
        if module != self.recomputed_as:
            return 0.0
        q, kv = self._q(cut), self._kv(cut)
        statistics = block.slots * (self.num_heads // cut.tp_size) * FP32
        if not cut.copies(block):
            return statistics + block.tokens * q * cut.element  # its output: the next layer keeps a copy
        rows, inputs = block.slots * 2 * (q + kv), block.tokens * (q + 2 * kv)
        return statistics + (rows - inputs) * cut.element

    def widest_elements(self, block: LayerBlock, cut: Cut, *, backward: bool) -> float:
        return (self._q(cut) + 2 * self._kv(cut)) * block.slots * 3

    def products_bytes(self, block: LayerBlock, cut: Cut, *, backward: bool) -> float:
        if self.is_whole or (self.soft_cap is None and cut.element != FP32):
            return 0.0
        keys = block.longest if self.window is None else min(self.window, block.longest)
        return min(LARGEST_TILE, block.slots * self.num_heads // cut.tp_size * keys) * FP32 * (1 + backward)

    def columns(self, cut: Cut) -> float:
        return (2 + self.gated) * self._q(cut) + 2 * self._kv(cut)

    def engine_elements(self, tp_size: int) -> int:
        return ((1 + self.gated) * self.num_heads + 2 * self.num_kv_heads) * self.head_size // tp_size

    def cached_elements(self, tp_size: int) -> int:
        return 2 * self._kv_heads(tp_size) * self.head_size

    @property
    def not_cut(self) -> str:
        return "" if self.is_whole else "attention with windows or bounded products"

    def exchanged_bytes(self, block: LayerBlock, cut: Cut, num_ranks: int, *, backward: bool) -> float:
        # Keys and values in the model's dtype; their gradients and this rank's output accumulate in float32.
        pairs = num_ranks * block.tokens * 2 * self._kv(cut) * (cut.element + (FP32 if backward else 0))
        return pairs + block.tokens * self._q(cut) * FP32

    def engine_problem(self, device: str) -> tuple[str, str] | None:
        size, rule = self.head_size, ""
        if device == "cpu" and size not in CPU_HEAD_SIZES:
            rule = f"must be one of {', '.join(map(str, CPU_HEAD_SIZES))}"
        if device == "cuda" and (size % CUDA_HEAD_MULTIPLE or size > CUDA_LARGEST_HEAD):
            rule = f"must be a multiple of {CUDA_HEAD_MULTIPLE} and <= {CUDA_LARGEST_HEAD}"
        because = f": vLLM has no attention kernel for another on trainer.device={device}"
        return (f"head_dim({size})", rule + because) if rule else None

    def megatron_settings(self) -> dict[str, object]:
        return {
            "num_query_groups": self.num_kv_heads,
            "kv_channels": self.head_size,
            "add_qkv_bias": self.qkv_bias,
            "qk_layernorm": self.qk_norm,
            "attention_output_gate": self.gated,
        }
