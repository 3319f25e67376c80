"""Layers with experts: Megatron's router and token dispatch around weights in the rollout engine's layout.

Legend: T tokens that reached this rank, E experts of this rank, H hidden size, F columns of an expert on this rank
(the whole expert's over the expert TP ranks), K experts that a token is sent to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from megatron_rl.device import has_grouped_mm, in_one_copy
from megatron_rl.model.adapters import ExpertAdapters, plain_linears
from megatron_rl.model.eight_bits import EightBitStack
from megatron_rl.model.families import Model, Routing
from megatron_rl.model.mlp import SiluGate
from megatron_rl.parallel.rank_grid import TrainGrid

Linears = Sequence[Callable[..., Tensor]]
"""The product with the matrix [O, I] of each expert: [T, I] -> [T, O]; takes a `bias` [O] where it has no adapters."""


def moe_settings(model: Model, hf_settings: dict[str, Any], grid: TrainGrid) -> dict[str, Any]:
    """The part of Megatron's configuration that only a model with experts has; {} for others.

    No token is dropped and no balancing loss is added: log-probs must be those of the rollout engine, and the policy
    loss alone moves the router.
    """
    with_experts = [layer.has_experts for layer in model.layers]
    if not any(with_experts):
        return {}
    routing, settings = Routing.from_hf(model.family, model.family.given(hf_settings)), dict[str, Any]()
    if not all(with_experts):
        settings["moe_layer_freq"] = list(map(int, with_experts))
    if routing.shared_size:
        settings["moe_shared_expert_intermediate_size"] = routing.shared_size
        settings["moe_shared_expert_gate"] = routing.shared_gate
    return settings | {
        "num_moe_experts": routing.num_experts,
        "moe_ffn_hidden_size": routing.ffn_size,
        "moe_router_topk": routing.experts_per_token,
        # A softmax over the chosen logits is the softmax over all of them, normalised to the chosen ones.
        "moe_router_pre_softmax": not routing.normalised,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": grid.ep_size,
        "expert_tensor_parallel_size": grid.expert_tp_size,
    }


def has_experts(config: TransformerConfig, layer: int) -> bool:
    """Whether a layer, counted over the whole model, has experts under Megatron's configuration."""
    if not config.num_moe_experts:
        return False
    return isinstance(config.moe_layer_freq, int) or bool(config.moe_layer_freq[layer])


class SharedExpertsLayer(SharedExpertMLP):
    """Megatron's MLP that every token passes next to the experts, with `SiluGate`, which keeps less for backward.

    Under sequence parallelism input, output and the gate that scales the output are this rank's part of the sequence.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [S, B, H] -> same shape."""
        mixed, _ = self.linear_fc1(hidden_states)
        output, _ = self.linear_fc2(SiluGate.apply(mixed))
        out: Tensor = output
        if self.gate_weight is not None:
            out = output * torch.sigmoid(F.linear(hidden_states, self.gate_weight))
        return out


class StackedExperts(MegatronModule):
    """The gated MLPs of this rank's experts, stacked as vLLM stacks them.

    w13 [E, 2F, H] holds [gate; up], w2 [E, H, F]. Expert TP ranks return partial sums; Megatron's dispatcher adds them.
    With adapters experts run one after the other, also while these are off, so that both compute the same sums.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
    ) -> None:
        """name: the module's, which newer versions of Megatron pass."""
        super().__init__(config=config)
        self.tp_group = pg_collection.expt_tp
        self.adapters: ExpertAdapters | None = None
        self.eight_bits: Mapping[str, EightBitStack] | None = None
        hidden, columns = config.hidden_size, config.moe_ffn_hidden_size // self.tp_group.size()

        def weight(*shape: int) -> torch.nn.Parameter:
            parameter = torch.nn.Parameter(torch.empty(num_local_experts, *shape, dtype=config.params_dtype))
            # False: not reduced with the other parameters, whose replicas are elsewhere, but in DDP's expert buffers.
            vars(parameter)["allreduce"] = False
            return parameter

        self.w13 = weight(2 * columns, hidden)
        self.w2 = weight(hidden, columns)

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """tokens [T, H] sorted by expert, tokens_per_expert int64 [E], weights [T] -> ([T, H], None: no bias)."""
        if self.adapters is None and self.eight_bits is None and fits_grouped_mm(tokens, self.w13, self.w2):
            return grouped(tokens, tokens_per_expert, weights, self.w13, self.w2), None
        return one_by_one(tokens, tokens_per_expert, weights, self.w13, self.w2, self._linears), None

    def _linears(self, name: str, stack: Tensor) -> Linears:
        linears = stack_linears(self.eight_bits, name, stack)
        return linears if self.adapters is None else self.adapters.linears(name, linears)


def stack_linears(eight_bits: Mapping[str, EightBitStack] | None, name: str, stack: Tensor) -> Linears:
    """Return the product with each matrix of the stack `name`: that of `eight_bits`, or plain."""
    return plain_linears(stack) if eight_bits is None else eight_bits[name].linears(stack)


def fits_grouped_mm(tokens: Tensor, w13: Tensor, w2: Tensor) -> bool:
    """Whether `grouped` can run; an empty batch goes to `one_by_one`."""
    row_bytes = [tensor.shape[-1] * tensor.element_size() for tensor in (tokens, w13, w2)]
    return len(tokens) > 0 and has_grouped_mm(tokens) and all(size % 16 == 0 for size in row_bytes)


def grouped(tokens: Tensor, tokens_per_expert: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Run all experts in two calls. Arguments: see `StackedExperts.forward`; w13 [E, 2F, H], w2 [E, H, F]."""
    # Megatron counts on the device, reads the counts for its splits, and passes what it read.
    ends = in_one_copy([{"ends": tokens_per_expert.cumsum(0).to(torch.int32)}], tokens.device)[0]["ends"]
    hidden = gated(F.grouped_mm(tokens, w13.transpose(1, 2), offs=ends))
    return F.grouped_mm(hidden, w2.transpose(1, 2), offs=ends) * weights.unsqueeze(-1).to(tokens.dtype)


def one_by_one(
    tokens: Tensor,
    tokens_per_expert: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    linears: Callable[[str, Tensor], Linears] | None = None,
) -> Tensor:
    """Compute `grouped` one expert after the other. linears: the products with a stack of this name; None:
    plain.
    """
    linears = partial(stack_linears, None) if linears is None else linears
    counts = tokens_per_expert.tolist()
    experts = zip(tokens.split(counts), weights.split(counts), linears("w13", w13), linears("w2", w2), strict=True)
    outputs = [down(gated(up(mine))) * weight.unsqueeze(-1).to(mine.dtype) for mine, weight, up, down in experts]
    return torch.cat(outputs)


def gated(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2F], [gate; up] along the last dim -> silu(gate) * up, [T, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
