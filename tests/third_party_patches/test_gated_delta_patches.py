"""The patch for models with layers of the gated delta rule, without it and with it, in a process of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


def served_by(layer_dtype, with_patch: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of vLLM's gated delta rule over a prompt of 9 tokens, then a token of its answer, and the recurrence's.

    On a layer of 2 heads of keys and 4 of values, of 32 elements, with a plain weight of the convolution.
    """
    from vllm.forward_context import override_forward_context
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

    if with_patch:
        from third_party_patches.vllm.cpu_gated_delta import PATCH

        PATCH.apply()
        PATCH.apply()
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(layer_dtype)

    mixed, b, a, out = normal(10, 256), normal(10, 4), normal(10, 4), torch.zeros(10, 4, 32, dtype=layer_dtype)
    layer = SimpleNamespace(prefix="delta", A_log=normal(4).float(), dt_bias=normal(4), activation="silu")
    layer.conv1d = SimpleNamespace(weight=0.5 * normal(256, 1, 4), bias=None)
    layer.key_dim, layer.value_dim, layer.head_k_dim, layer.head_v_dim, layer.tp_size = 64, 128, 32, 32, 1
    layer.rearrange_mixed_qkv = lambda x: QwenGatedDeltaNetAttention.rearrange_mixed_qkv(layer, x)
    # A request before left something in every slot.
    layer.kv_cache = (torch.full((3, 3, 256), 7.0).to(layer_dtype), torch.full((3, 4, 32, 32), 7.0))
    for first, last, is_prompt in ((0, 9, True), (9, 10, False)):
        length = last - first
        meta = GDNAttentionMetadata(int(is_prompt), length * is_prompt, 1 - is_prompt, 1 - is_prompt, 0, 0, length)
        meta.non_spec_query_start_loc = torch.tensor([0, length], dtype=torch.int32)
        meta.non_spec_state_indices_tensor = torch.tensor([2], dtype=torch.int32)
        meta.has_initial_state = torch.tensor([not is_prompt])
        context = SimpleNamespace(no_compile_layers={"delta": layer}, attn_metadata={"delta": meta})
        rows = slice(first, last)
        with override_forward_context(context):
            gdn_attention.cpu_gdn_attention_core(mixed[rows], b[rows], a[rows], out[rows], "delta")
    return out.float(), recurrence(layer, mixed.double(), b.double(), a.double())


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
        served_by(torch.float32, with_patch=False)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 3e-3)):
        found, expected = served_by(dtype, with_patch=True)
        assert (found - expected).abs().max() < bound * expected.abs().max(), dtype


def test_gated_delta_on_cpu():
    """vLLM refuses float32; with the patch prompt and answer equal the recurrence, from zeros, in both dtypes.

    Would not catch a slot that two requests share.
    """
    run_ranks(1, check_gated_delta, timeout=100)
