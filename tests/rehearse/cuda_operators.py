"""Operators of vLLM's GPU wheel as torch knows them: by schema, without a kernel.

With a schema Dynamo traces through a call, and a dispatch mode sees its writes; torch itself makes the fake form of
one that returns nothing. The schemas are those of `csrc/libtorch_stable/torch_bindings.cpp`.
"""

from __future__ import annotations

import torch

_KEPT: list[torch.library.Library] = []
"""A library's operators go with it."""

NORM = "Tensor! result, Tensor input, Tensor weight"
QUANTIZED = "Tensor! result, Tensor input"
SCHEMAS = {
    "rms_norm": f"{NORM}, float epsilon",
    "fused_add_rms_norm": "Tensor! input, Tensor! residual, Tensor weight, float epsilon",
    "rms_norm_static_fp8_quant": f"{NORM}, Tensor scale, float epsilon",
    "fused_add_rms_norm_static_fp8_quant": "Tensor! result, Tensor input, Tensor! residual, Tensor weight, "
    "Tensor scale, float epsilon",
    "rms_norm_dynamic_per_token_quant": f"{NORM}, Tensor! scale, float epsilon, Tensor? scale_ub, Tensor!? residual",
    "rms_norm_per_block_quant": f"{NORM}, Tensor! scale, float epsilon, Tensor? scale_ub, Tensor!? residual, "
    "int group_size, bool is_scale_transposed",
    "rotary_embedding": "Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, "
    "bool is_neox, int rope_dim_offset=0, bool inverse=False",
    "fused_qk_norm_rope": "Tensor! qkv, int num_heads_q, int num_heads_k, int num_heads_v, int head_dim, float eps, "
    "Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, bool is_neox, Tensor position_ids, "
    "int forced_token_heads_per_warp=-1",
    "silu_and_mul": QUANTIZED,
    "gelu_and_mul": QUANTIZED,
    "gelu_tanh_and_mul": QUANTIZED,
    "silu_and_mul_quant": f"{QUANTIZED}, Tensor scale",
    "silu_and_mul_per_block_quant": "Tensor! out, Tensor input, Tensor! scales, int group_size, "
    "Tensor? scale_ub=None, bool is_scale_transposed=False",
    "static_scaled_fp8_quant": f"{QUANTIZED}, Tensor scale, int[]? group_shape=None",
    "dynamic_scaled_fp8_quant": f"{QUANTIZED}, Tensor! scale",
    "dynamic_per_token_scaled_fp8_quant": f"{QUANTIZED}, Tensor! scale, Tensor? scale_ub",
    "per_token_group_fp8_quant": "Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, "
    "float fp8_min, float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, bool dummy_is_tma_aligned",
    "vocab_parallel_embedding": "Tensor! out, Tensor input_ids, Tensor weight, int org_vocab_start_index, "
    "int org_vocab_end_index, int num_org_vocab_padding, int added_vocab_start_index, int added_vocab_end_index",
}
"""Name in the namespace `_C` -> arguments; none returns anything."""


def define() -> None:
    """Let torch know them. Before vLLM's compiler is imported, which looks them up."""
    library = torch.library.Library("_C", "FRAGMENT")
    for name, arguments in SCHEMAS.items():
        library.define(f"{name}({arguments}) -> ()")
    _KEPT.append(library)
