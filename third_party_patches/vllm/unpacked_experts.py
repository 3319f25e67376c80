"""Keep the weights of vLLM's CPU experts in their plain layout.

Reason: vLLM's CPU backend pads and prepacks the stacked expert weights into its own tensors. Weights shared with the
trainer would be copied once, and later updates would be lost.
What it does: no weight is packed, and each expert multiplies its tokens with the plain `[E, 2F, H]` ([gate; up]) and
`[E, H, F]` weights.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F

from third_party_patches.guard import VLLM_CPU, Patch
from third_party_patches.vllm.unpacked_linear import plain_linear


def keep_plain(experts: object, layer: torch.nn.Module) -> None:
    """Replace `process_weights_after_loading`: do not pad, pack or replace weights."""


class Stack(Protocol):
    """Matrices of experts, one after the other: a tensor [E, rows, columns], or what makes each when it is asked."""

    def __len__(self) -> int: ...

    def __getitem__(self, expert: int, /) -> torch.Tensor: ...


def plain_experts(
    tokens: torch.Tensor,
    w13: Stack,
    w2: Stack,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    weigh_input: bool,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, [T, H], without copying the weights.

    tokens [T, H], w13 [E, 2F, H], w2 [E, H, F]; weights and expert_ids [T, K], -1 for an expert of another rank.
    weigh_input: the tokens are already multiplied by the weights.
    """
    output = torch.zeros_like(tokens)
    flat_ids, top_k = expert_ids.flatten().long(), expert_ids.shape[1]
    order = flat_ids.argsort()
    counts = torch.bincount(flat_ids + 1, minlength=len(w13) + 1).tolist()
    for expert, mine in enumerate(order.split(counts)[1:]):
        if not len(mine):
            continue
        rows = mine // top_k
        gate, up = plain_linear(tokens[rows], w13[expert], None).chunk(2, dim=-1)
        answer = plain_linear(F.silu(gate) * up, w2[expert], None)
        if not weigh_input:
            answer = answer * weights.flatten()[mine, None].to(answer.dtype)
        output.index_add_(0, rows, answer)
    return output


def apply_plain(
    experts: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
    a1q_scale: torch.Tensor | None,
    a2_scale: torch.Tensor | None,
    workspace13: torch.Tensor,
    workspace2: torch.Tensor,
    expert_tokens_meta: object,
    apply_router_weight_on_input: bool,
) -> None:
    """Replace `CPUUnquantizedExperts.apply`. Raises NotImplementedError for biases and other activations than silu.

    experts.stacks: read in place of the weights, if it is there.
    """
    if activation.value != "silu" or experts.w1_bias is not None:
        raise NotImplementedError(f"unpacked experts are gated by silu and have no bias, not {activation.value}")
    local_ids = topk_ids if expert_map is None else expert_map[topk_ids.long()]
    stacks: tuple[Stack, Stack] = getattr(experts, "stacks", (w1, w2))
    output.copy_(plain_experts(hidden_states, *stacks, topk_weights, local_ids, apply_router_weight_on_input))


def apply() -> None:
    """Replace both methods; must run before an engine loads its model. The classes for other CPUs inherit them."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    CPUUnquantizedExperts.process_weights_after_loading = keep_plain
    CPUUnquantizedExperts.apply = apply_plain


PATCH = Patch(VLLM_CPU, apply, drop_when="vLLM offers a switch that keeps CPU weights unpacked")
