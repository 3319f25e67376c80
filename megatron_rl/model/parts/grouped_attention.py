"""Attention with heads of queries that share heads of keys and values, in all its variants."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.model.parts.param_spec import ParamSpec, single, whole
from megatron_rl.model.parts.part import FP32, AttentionPart, Cut, LayerBlock
from megatron_rl.parallel.sharding import LogicalTensor, Segment

LARGEST_TILE = 1 << 24
"""Products of queries and keys that `model/block_attention.py` holds at the same time."""
BLOCK_SIZES = {"cpu": 32, "cuda": 16}
"""Tokens of one block of vLLM's cache, by device. The kernel on CPU accepts multiples of 32."""
CPU_HEAD_SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Elements of a head for which vLLM has kernels on CPU. vLLM's own list does not have 48, which it computes."""
KV_MATRICES = {False: 2, True: 1}
"""Whether values are keys -> matrices from the hidden state to heads of keys and values."""
CUDA_HEAD_MULTIPLE, CUDA_LARGEST_HEAD = 8, 256
"""FlashAttention's rule."""


@dataclass(frozen=True)
class WideHeads:
    """Heads of the layers without a window, where they differ from those of the others.

    size: elements of a head. num_kv: heads of keys and values. values_are_keys: there is no projection to values; they
    are the keys before norm and rotation.
    """

    size: int
    num_kv: int
    values_are_keys: bool


@dataclass(frozen=True)
class AttentionShape:
    """One model's attention. scale: of products of queries and keys. soft_cap: their bound; None: no bound.

    windows: per layer the number of positions that a token attends to, including its own; None: all before it; (): no
    layer has a window. turned: number of elements of a head that are rotated, from the first on. two_ropes: layers with
    a window have a rotary embedding of their own. wide: heads of layers without a window, which are turned whole; None:
    all layers have the same heads. value_norm: values are normalised per head, without a weight. sinks: every head has
    a learned logit that joins its softmax. gated: what heads response is scaled by a gate.
    """

    scale: float = 1.0
    turned: int = 0
    soft_cap: float | None = None
    windows: tuple[int | None, ...] = ()
    two_ropes: bool = False
    wide: WideHeads | None = None
    value_norm: bool = False
    sinks: bool = False
    gated: bool = False

    def window(self, layer: int) -> int | None:
        """The window of one layer, counted over the whole model from 0."""
        return self.windows[layer] if self.windows else None

    @property
    def is_whole(self) -> bool:
        """Whether attention is plain: no bound, no window and no sink."""
        return self.soft_cap is None and not any(self.windows) and not self.sinks


@dataclass(frozen=True)
class GroupedAttention(AttentionPart):
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245) of one layer.

    qkv_bias: q, k and v projections have biases. qk_norm: queries and keys are normalised, per head, or with
    joint_norms over all heads together. soft_cap: bound of products; None: none. window: positions that a token attends
    to, its own included; None: all before it. is_whole: no layer of the model has a bound, a window or a sink.
    value_norm: values are normalised per head, without a weight. values_are_keys: there is no projection to values;
    they are the keys before norm and rotation. kv_heads_key: the config.json key of num_kv_heads. has_kernel: GPUs have
    one if there is no bound. gated: the projection of queries has next to each head
    a gate of its size, whose sigmoid scales what the head responses.
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
    value_norm: bool = False
    values_are_keys: bool = False
    kv_heads_key: str = "num_key_value_heads"
    joint_norms: bool = False
    gated: bool = False

    def params(self, mega: str, hf: str) -> dict[str, ParamSpec]:
        """Queries, keys and values are stacked in one matrix per TP rank, as vLLM has them."""
        hidden, heads, kv_heads, size = self.hidden, self.num_heads, self.num_kv_heads, self.head_size

        names = "qk" if self.values_are_keys else "qkv"

        def qkv(kind: str, *columns: int) -> ParamSpec:
            counts = zip(names, (heads, kv_heads, kv_heads), strict=False)
            rows = ((name, num, size * (1 + (self.gated and name == "q"))) for name, num in counts)
            parts = tuple(Segment(name, (num * each, *columns), num) for name, num, each in rows)
            theirs = tuple(f"{hf}self_attn.{part.name}_proj.{kind}" for part in parts)
            return ParamSpec(LogicalTensor(f"{hf}self_attn.qkv_proj.{kind}", parts, tp_dim=0), theirs)

        o_proj = Segment("columns", (hidden, heads * size), heads)
        params = {
            f"{mega}self_attention.linear_proj.weight": single(f"{hf}self_attn.o_proj.weight", o_proj, 1),
            f"{mega}self_attention.linear_qkv.weight": qkv("weight", hidden),
        }
        if self.qkv_bias:
            params[f"{mega}self_attention.linear_qkv.bias"] = qkv("bias")
        if self.qk_norm:
            for part, num in (("q", heads), ("k", kv_heads)):
                name, theirs = f"{mega}self_attention.{part}_layernorm.weight", f"{hf}self_attn.{part}_norm.weight"
                params[name] = whole(theirs, (size,))
                if self.joint_norms:
                    params[name] = single(theirs, Segment("heads", (num * size,), num), 0)
        return params

    @property
    def token_elements(self) -> int:
        kv_heads = KV_MATRICES[self.values_are_keys] * self.num_kv_heads
        return self.hidden * ((2 + self.gated) * self.num_heads + kv_heads) * self.head_size

    @property
    def query_columns(self) -> int:
        return self.num_heads * self.head_size

    @property
    def num_seen(self) -> int | None:
        return self.window

    def _kv_heads(self, tp_size: int) -> int:
        """Heads on one rank: those of few heads are repeated."""
        return max(1, self.num_kv_heads // tp_size)

    def _shares(self, cut: Cut) -> tuple[int, int]:
        """Columns of queries, and of keys, on one rank."""
        return self.num_heads // cut.tp_size * self.head_size, self._kv_heads(cut.tp_size) * self.head_size

    def kept_bytes(self, block: LayerBlock, cut: Cut) -> float:
        (q, kv), element, copies = self._shares(cut), cut.element, cut.copies(block)
        mixed, own = q + KV_MATRICES[self.values_are_keys] * kv, 0.0
        statistics = block.slots * (self.num_heads // cut.tp_size) * FP32
        if self.qk_norm:
            norms = self.num_heads // cut.tp_size + self._kv_heads(cut.tp_size)
            own += block.tokens * (2 if self.joint_norms else norms) * FP32
            # The float32 norm, which is our own on CPUs, keeps no copy of its input.
            own += block.tokens * (q + kv) * element if element != FP32 else 0
            own += block.tokens * mixed * element if block.slots != block.tokens or copies else 0
        # The gates, and what they scale.
        own += 2 * self.gated * block.tokens * q * element
        if self.value_norm:
            own += block.tokens * (self._kv_heads(cut.tp_size) * FP32 + (0 if copies else kv * element))
        if copies:
            return own + statistics + (block.tokens * q + block.slots * (2 * q + 2 * kv)) * element
        # Values are read where the fused projection wrote them.
        return own + statistics + block.tokens * (mixed + kv + 2 * q) * element

    def again_bytes(self, block: LayerBlock, cut: Cut, module: str) -> float:
        if module != self.recomputed_as:
            return 0.0
        q, kv = self._shares(cut)
        statistics = block.slots * (self.num_heads // cut.tp_size) * FP32
        if not cut.copies(block):
            return statistics + block.tokens * q * cut.element  # its output: the next layer keeps a copy
        rows, inputs = block.slots * 2 * (q + kv), block.tokens * (q + KV_MATRICES[self.values_are_keys] * kv)
        return statistics + (rows - inputs) * cut.element

    def widest_elements(self, block: LayerBlock, cut: Cut, *, backward: bool) -> float:
        q, kv = self._shares(cut)
        return (q + 2 * kv) * block.slots * 3

    def products_bytes(self, block: LayerBlock, cut: Cut, *, backward: bool) -> float:
        if self.is_whole or (self.has_kernel and self.soft_cap is None and cut.element != FP32):
            return 0.0
        keys = block.longest if self.window is None else min(self.window, block.longest)
        return min(LARGEST_TILE, block.slots * self.num_heads // cut.tp_size * keys) * FP32 * (1 + backward)

    def columns(self, cut: Cut) -> float:
        q, kv = self._shares(cut)
        return (2 + self.gated) * q + KV_MATRICES[self.values_are_keys] * kv

    def engine_elements(self, tp_size: int) -> int:
        return ((1 + self.gated) * self.num_heads + 2 * self.num_kv_heads) * self.head_size // tp_size

    def cached_elements(self, tp_size: int) -> int:
        return 2 * self._kv_heads(tp_size) * self.head_size

    @property
    def tp_divides(self) -> dict[str, int]:
        return {self.kv_heads_key: self.num_kv_heads}

    def exchanged_bytes(self, block: LayerBlock, cut: Cut, num_ranks: int, *, backward: bool) -> float:
        # Keys and values in the model's dtype; their gradients and this rank's output accumulate in float32.
        q, kv = self._shares(cut)
        pairs = num_ranks * block.tokens * 2 * kv * (cut.element + (FP32 if backward else 0))
        return pairs + block.tokens * q * FP32

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
            # Megatron sums the gradients of these norms over TP ranks, which cut joint norms.
            "qk_layernorm": self.qk_norm and not self.joint_norms,
            "attention_output_gate": self.gated,
        }
