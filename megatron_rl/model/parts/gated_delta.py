"""Linear attention by the gated delta rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_rl.model.parts.grouped_attention import BLOCK_SIZES
from megatron_rl.model.parts.param_spec import ParamSpec, single, whole
from megatron_rl.model.parts.part import FP32, AttentionPart, Cut, LayerBlock
from megatron_rl.parallel.sharding import LogicalTensor, Segment

CHUNK = 64
"""Tokens that `model/delta_rule.py` computes together."""
NAME = "the gated delta rule"
KEY_HEADS, VALUE_HEADS = "linear_num_key_heads", "linear_num_value_heads"
SIZE_KEYS = (KEY_HEADS, VALUE_HEADS, "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim")


@dataclass(frozen=True)
class GatedDelta(AttentionPart):
    """Gated delta net (Yang et al., arXiv:2412.06464) of one layer, as in Qwen3-Next and Qwen3.5.

    num_keys, num_values: heads of keys and of values, of which several share a head of keys; key_size, value_size: of a
    head. width: tokens of the convolution. interleaved: a folder has one tensor of projections, with queries, keys,
    values and gates of each head of keys together; else they are sections of two.
    """

    recomputed_as = ""  # the rule is computed again in any case
    undrafted = NAME
    fused_package = "fla"
    block_sizes = BLOCK_SIZES
    engine_arguments: ClassVar[Mapping[str, object]] = {
        # The manager of one kind of cache has no states.
        "disable_hybrid_kv_cache_manager": False,
        # As in training. By default vLLM keeps it in the dtype of the weights on CUDA.
        "mamba_ssm_cache_dtype": "float32",
    }

    hidden: int
    num_keys: int
    num_values: int
    key_size: int
    value_size: int
    width: int
    interleaved: bool = False

    @classmethod
    def from_hf(cls, settings: Mapping[str, Any], interleaved: bool) -> GatedDelta:
        """Read it from the settings of a config.json. Raises KeyError if a number is missing."""
        keys, values, key, value, width = (settings[key] for key in SIZE_KEYS)
        return cls(settings["hidden_size"], keys, values, key, value, width, interleaved)

    @property
    def _key_columns(self) -> int:
        """Columns of all heads' keys."""
        return self.num_keys * self.key_size

    @property
    def value_columns(self) -> int:
        """Columns of all heads' values."""
        return self.num_values * self.value_size

    @property
    def channels(self) -> int:
        """Columns that the convolution passes: queries, keys and values."""
        return 2 * self._key_columns + self.value_columns

    @property
    def tp_divides(self) -> dict[str, int]:
        return {KEY_HEADS: self.num_keys}

    @property
    def cp_divides(self) -> dict[str, int]:
        """Context-parallel ranks exchange tokens for heads of keys, with the heads of values that share them."""
        return {KEY_HEADS: self.num_keys}

    def params(self, mega: str, hf: str) -> dict[str, ParamSpec]:
        """Everything but the norm is cut by heads of keys, with the heads of values that share them."""
        ours, theirs = f"{mega}self_attention.", f"{hf}linear_attn."
        per_value = Segment("heads", (self.num_values,), self.num_values)
        conv = LogicalTensor(f"{theirs}conv1d.weight", self._sections("qkv", 1, self.width), 0)
        out = Segment("columns", (self.hidden, self.value_columns), self.num_values)
        return {
            f"{ours}A_log": single(f"{theirs}A_log", per_value, 0),
            f"{ours}dt_bias": single(f"{theirs}dt_bias", per_value, 0),
            **self._projections(ours, theirs),
            f"{ours}conv.weight": ParamSpec(conv, (f"{theirs}conv1d.weight",) * 3),
            f"{ours}norm.weight": whole(f"{theirs}norm.weight", (self.value_size,)),
            f"{ours}linear_proj.weight": single(f"{theirs}out_proj.weight", out, 1),
        }

    def _sections(self, names: str, *columns: int) -> tuple[Segment, ...]:
        """Segments of queries, keys, values and gates, by the letters q, k, v and z."""
        keys, values = (self._key_columns, self.num_keys), (self.value_columns, self.num_values)
        sizes = {"q": keys, "k": keys, "v": values, "z": values}
        return tuple(Segment(name, (sizes[name][0], *columns), sizes[name][1]) for name in names)

    def _projections(self, ours: str, theirs: str) -> dict[str, ParamSpec]:
        hidden, values = self.hidden, self.num_values
        qkvz, ba = f"{theirs}in_proj_qkvz.weight", f"{theirs}in_proj_ba.weight"
        if self.interleaved:
            rows = Segment("heads", (self.channels + self.value_columns, hidden), self.num_keys)
            specs = single(qkvz, rows, 0), single(ba, Segment("heads", (2 * values, hidden), self.num_keys), 0)
        else:
            sections = self._sections("qkvz", hidden)
            names = (*(f"{theirs}in_proj_qkv.weight",) * 3, f"{theirs}in_proj_z.weight")
            rates = tuple(Segment(name, (values, hidden), values) for name in "ba")
            specs = (
                ParamSpec(LogicalTensor(qkvz, sections, 0), names),
                ParamSpec(LogicalTensor(ba, rates, 0), tuple(f"{theirs}in_proj_{name}.weight" for name in "ba")),
            )
        return dict(zip((f"{ours}linear_qkvz.weight", f"{ours}linear_ba.weight"), specs, strict=True))

    @property
    def token_elements(self) -> int:
        projected = self.hidden * (self.channels + 2 * self.value_columns + 2 * self.num_values)
        # The state is read twice and written once.
        states = 3 * self.num_values * self.key_size * self.value_size
        return projected + self.channels * self.width + states

    @property
    def query_columns(self) -> int:
        """No product grows with the length of a sequence."""
        return 0

    def kept_bytes(self, block: LayerBlock, cut: Cut) -> float:
        tp, tokens = cut.tp_size, block.tokens
        inputs, values = (self.channels + 2 * self.num_values) // tp, self.value_columns // tp
        # What the rule begins with, its output, and that times the gate.
        rows = block.slots
        kept = rows * inputs + 3 * values * tokens
        return kept * cut.element

    def widest_elements(self, block: LayerBlock, cut: Cut, *, backward: bool) -> float:
        """Forward: projections, their kept copies, and those that ranks exchange. Backward: the output's gradient."""
        tokens, values = block.tokens // cut.tp_size, self.value_columns
        if backward:
            return tokens * values
        inputs = self.channels + 2 * self.num_values
        return tokens * ((2 + (block.num_sharing > 1)) * inputs + 2 * values)

    def products_bytes(self, block: LayerBlock, cut: Cut, *, backward: bool) -> float:
        """Bytes of the rule in float32 over a bucket of segments, taken as all of them.

        Forward: its convolution, or its last step. Backward, where it has made all of that again: the first gradients
        of chunks, each as large as what it is a gradient of, while two of one tensor are added up.
        """
        heads, channels = self.num_values // cut.tp_size, self.channels // cut.tp_size
        keys, values, pairs = (heads * size for size in (self.key_size, self.value_size, CHUNK))
        states = heads * self.key_size * self.value_size
        if not backward:
            convolution = (4 + (cut.element != FP32)) * channels
            last = channels + 4 * keys + 4 * values + 3 * pairs
            return FP32 * (block.slots * max(convolution, last) + 2 * states)
        made = 3 * channels + 5 * keys + 2 * values + 6 * pairs + states / CHUNK
        outputs = values * (1 + cut.element / FP32)  # and their gradients
        gradients = 3 * keys + values + pairs + 2 * max(keys, values)
        return FP32 * block.slots * (made + outputs + gradients)

    def columns(self, cut: Cut) -> float:
        return (self.channels + 2 * self.value_columns + 2 * self.num_values) // cut.tp_size

    def engine_elements(self, tp_size: int) -> int:
        return 2 * (self.channels + self.value_columns) // tp_size

    def cached_elements(self, tp_size: int) -> int:
        """States are of a request, not of its tokens."""
        return 0

    def state_bytes(self, tp_size: int, element: int) -> int:
        """The last tokens of the convolution in the dtype of the weights, and the state in float32."""
        convolved = (self.width - 1) * self.channels * element
        return (convolved + self.num_values * self.key_size * self.value_size * FP32) // tp_size
