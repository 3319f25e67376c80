"""The critic's head, which maps a hidden state to one value."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor


class ValueHead(torch.nn.Module):
    """Linear map from hidden size to one value, in place of Megatron's output layer; replicated over TP ranks.

    The weight is initialised from its own seeded generator, so that every layout starts from the same critic.
    """

    def __init__(self, config: Any, seed: int, tp_group: dist.ProcessGroup) -> None:
        super().__init__()
        self.sequence_parallel, self.tp_group = config.sequence_parallel, tp_group
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(1, config.hidden_size, generator=generator) * config.init_method_std
        self.weight = torch.nn.Parameter(weight.to(config.params_dtype))

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """hidden [S, B, H] (under sequence parallelism this rank's part of S) -> (values [S, B, 1], None).

        The other arguments are Megatron's and unused. All TP ranks must call.
        """
        if self.sequence_parallel:
            # Every TP rank continues to compute the whole loss, so its gradient is whole too and must not be summed.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return torch.nn.functional.linear(hidden, self.weight), None
