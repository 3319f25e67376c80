"""The patch for models with layers of the gated delta rule, without it and with it, in a process of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


ALONE = [[(0, 0, 9)], [(0, 9, 10)]]
TOGETHER = [[(0, 0, 9), (1, 0, 4), (2, 0, 9)], [(0, 9, 10), (2, 9, 10), (3, 0, 5), (1, 4, 9)]]
"""Calls of the rule: (request, first token, end) of each, those that draw a token first."""


def served_by(layer_dtype, with_patch: bool, calls) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each request the outputs of vLLM's gated delta rule over these calls, and the recurrence's.

    On a layer of 2 heads of keys and 4 of values, of 32 elements, with a plain weight of the convolution.
    """
    from vllm.forward_context import override_forward_context
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    if with_patch:
        from third_party_patches.vllm.cpu_gated_delta import PATCH

        PATCH.apply()
        PATCH.apply()
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(layer_dtype)

    layer = SimpleNamespace(prefix="delta", A_log=normal(4).float(), dt_bias=normal(4), activation="silu")
    layer.conv1d = SimpleNamespace(weight=0.5 * normal(256, 1, 4), bias=None)
    layer.key_dim, layer.value_dim, layer.head_k_dim, layer.head_v_dim, layer.tp_size = 64, 128, 32, 32, 1
    layer.rearrange_mixed_qkv = lambda x: QwenGatedDeltaNetAttention.rearrange_mixed_qkv(layer, x)
    # A request before left something in every slot.
    layer.kv_cache = (torch.full((6, 3, 256), 7.0).to(layer_dtype), torch.full((6, 4, 32, 32), 7.0))
    lengths = {request: end for call in calls for request, _, end in call}
    inputs = {
        request: (normal(length, 256), normal(length, 4), normal(length, 4)) for request, length in lengths.items()
    }
    outputs = {request: torch.zeros(length, 4, 32, dtype=layer_dtype) for request, length in lengths.items()}
    for call in calls:
        mixed, b, a = (torch.cat([inputs[r][part][first:end] for r, first, end in call]) for part in range(3))
        out = torch.zeros(len(mixed), 4, 32, dtype=layer_dtype)
        context = SimpleNamespace(no_compile_layers={"delta": layer}, attn_metadata={"delta": metadata(call)})
        with override_forward_context(context):
            gdn_attention.cpu_gdn_attention_core(mixed, b, a, out, "delta")
        for (request, first, end), part in zip(call, out.split([end - first for _, first, end in call]), strict=True):
            outputs[request][first:end] = part
    return [(outputs[r].float(), recurrence(layer, *(part.double() for part in inputs[r]))) for r in lengths]


def metadata(call):
    """What vLLM says of a call to the layers; request r has slot 5 - r."""
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

    lengths = [end - first for _, first, end in call]
    drawing = [first > 0 and end == first + 1 for _, first, end in call]
    assert drawing == sorted(drawing, reverse=True)
    num_drawing, num_tokens = sum(drawing), sum(lengths)
    meta = GDNAttentionMetadata(
        len(call) - num_drawing, num_tokens - num_drawing, num_drawing, num_drawing, 0, 0, num_tokens
    )
    meta.non_spec_query_start_loc = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    meta.non_spec_state_indices_tensor = torch.tensor([5 - request for request, _, _ in call], dtype=torch.int32)
    meta.has_initial_state = torch.tensor([first > 0 for _, first, _ in call])
    return meta


def recurrence(layer, mixed, b, a) -> torch.Tensor:
    """The gated delta rule token by token, in float64."""
    padded = torch.cat([mixed.new_zeros(3, mixed.shape[1]), mixed])
    convolved = F.silu((padded.unfold(0, 4, 1) * layer.conv1d.weight[:, 0].double()).sum(-1))
    query, key, value = (part.unflatten(-1, (-1, 32)) for part in convolved.split([64, 64, 128], -1))
    query, key = (F.normalize(part, dim=-1).repeat_interleave(2, 1) for part in (query, key))
    decay = (-layer.A_log.double().exp() * F.softplus(a + layer.dt_bias.double())).exp()
    state, outputs = mixed.new_zeros(4, 32, 32), []
    for t in range(len(mixed)):
        state = state * decay[t][:, None, None]
        written = (value[t] - torch.einsum("nkv,nk->nv", state, key[t])) * b[t].sigmoid()[:, None]
        state = state + key[t][..., None] * written[:, None]
        outputs.append(torch.einsum("nkv,nk->nv", state, query[t]) * 32**-0.5)
    return torch.stack(outputs).float()


def check_gated_delta():
    with pytest.raises(AssertionError, match="requires BF16"):
        served_by(torch.float32, with_patch=False, calls=ALONE)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 3e-3)):
        for calls in (ALONE, TOGETHER):
            for found, expected in served_by(dtype, True, calls):
                assert (found - expected).abs().max() < bound * expected.abs().max(), dtype


def test_gated_delta_on_cpu():
    """vLLM refuses float32; with the patch each request's outputs equal its recurrence, from zeros, in both dtypes: one
    alone, and several of the same length and of others, parts of a prompt among them, beside those that draw a token.

    Would not catch states that vLLM puts into the wrong slot.
    """
    run_ranks(1, check_gated_delta, timeout=100)
