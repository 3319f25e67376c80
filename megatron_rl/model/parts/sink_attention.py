"""Grouped attention in which every head has a sink, and every projection a bias."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.model.parts.grouped_attention import GroupedAttention
from megatron_rl.model.parts.param_spec import ParamSpec, single, whole
from megatron_rl.parallel.sharding import Segment


@dataclass(frozen=True)
class SinkAttention(GroupedAttention):
    """Attention of gpt-oss: each head has a learned logit that joins its softmax; the output has a bias, too."""

    has_kernel = False

    def params(self, mega: str, hf: str) -> dict[str, ParamSpec]:
        """Sinks are cut by heads; the output's bias is whole on every rank, and added once."""
        core, proj = f"{mega}self_attention.core_attention.sinks", f"{mega}self_attention.linear_proj."
        usual = super().params(mega, hf)
        sinks = {core: single(f"{hf}self_attn.sinks", Segment("heads", (self.num_heads,), self.num_heads), 0)}
        out = {f"{proj}weight": usual.pop(f"{proj}weight")}
        return sinks | out | {f"{proj}bias": whole(f"{hf}self_attn.o_proj.bias", (self.hidden,))} | usual

    def copied_dtypes(self, device: str) -> tuple[str, ...]:
        return ("float16",) if device == "cpu" else ()
