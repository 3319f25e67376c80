"""The critic's head: hidden state in, one value out."""

from __future__ import annotations

import torch
from torch import Tensor


class ValueHead(torch.nn.Module):
    """Linear map from hidden size to one value, in place of Megatron's output layer; replicated over TP ranks.

    The weight is drawn from its own seeded generator, so that every layout starts from the same critic.
    """

    def __init__(self, config, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(1, config.hidden_size, generator=generator) * config.init_method_std
        self.weight = torch.nn.Parameter(weight.to(config.params_dtype))

    def forward(self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None):
        """hidden [S, B, H] -> (values [S, B, 1], None); the other arguments are Megatron's and unused."""
        return torch.nn.functional.linear(hidden, self.weight), None
