"""Let vLLM's Gemma-4 read keys for values, where a layer has no projection to values.

Reason: vLLM gives such a layer a fused projection [q; k; v] and loads the matrix of keys into both places. The trainer
has one matrix, [q; k]: a second copy could not be its memory, and would have to be kept equal after every update.
What it does: the fused projection of such a layer is [q; k], and its values are the keys before norm and rotation.
"""

from __future__ import annotations

from typing import Any

from third_party_patches.guard import VLLM, Patch


def has_no_values(config: Any, number: int) -> bool:
    """Whether layer `number` of a Gemma-4 takes keys for values."""
    shared = getattr(config, "num_kv_shared_layers", 0) or 0
    is_own = number < config.num_hidden_layers - shared
    return (
        bool(getattr(config, "attention_k_eq_v", False)) and is_own and config.layer_types[number] == "full_attention"
    )


def apply() -> None:
    """Change the attention of vLLM's Gemma-4; must run before an engine builds one."""
    from vllm.model_executor.layers.linear import QKVParallelLinear
    from vllm.model_executor.models.gemma4 import Gemma4Attention
    from vllm.model_executor.models.utils import extract_layer_index

    if Gemma4Attention.__init__.__module__ == __name__:
        return
    build, run = Gemma4Attention.__init__, Gemma4Attention.forward

    def __init__(attention: Any, config: Any, hidden_size: int, *args: Any, **options: Any) -> None:
        build(attention, config, hidden_size, *args, **options)
        prefix = options["prefix"]
        attention.takes_keys_for_values = has_no_values(config, extract_layer_index(prefix))
        if attention.takes_keys_for_values:
            attention.qkv_proj = QKVParallelLinear(
                hidden_size,
                attention.head_dim,
                attention.total_num_heads,
                attention.total_num_kv_heads,
                bias=config.attention_bias,
                quant_config=options.get("quant_config"),
                prefix=f"{prefix}.qkv_proj",
                v_head_size=0,
            )

    def forward(attention: Any, positions: Any, hidden_states: Any, **options: Any) -> Any:
        if not attention.takes_keys_for_values:
            return run(attention, positions, hidden_states, **options)
        mixed, _ = attention.qkv_proj(hidden_states)
        query, shared = mixed.split([attention.q_size, attention.kv_size], dim=-1)
        query = attention.q_norm(query.unflatten(-1, (attention.num_heads, attention.head_dim))).flatten(-2, -1)
        by_head = shared.unflatten(-1, (attention.num_kv_heads, attention.head_dim))
        key, value = (norm(by_head).flatten(-2, -1) for norm in (attention.k_norm, attention.v_norm))
        query, key = attention.rotary_emb(positions, query, key)
        out, _ = attention.o_proj(attention.attn(query, key, value))
        return out

    Gemma4Attention.__init__ = __init__
    Gemma4Attention.forward = forward


PATCH = Patch(VLLM, apply, drop_when="vLLM's Gemma-4 has no rows of values in layers that take keys for them")
