"""The linear that tensor parallelism does not cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class WholeLinear(torch.nn.Module):
    """A linear layer whose weight every TP rank holds; under sequence parallelism its gradient is summed over them.

    It is called as Megatron's linears are, and has their `tp_group`, `sequence_parallel` and `_forward_impl`.
    """

    def __init__(
        self, config: TransformerConfig, num_in: int, num_out: int, tp_group: torch.distributed.ProcessGroup
    ) -> None:
        super().__init__()
        self.tp_group, self.sequence_parallel = tp_group, config.sequence_parallel
        weight: Any = torch.nn.Parameter(torch.empty(num_out, num_in, dtype=config.params_dtype))
        weight.sequence_parallel = config.sequence_parallel
        self.weight = weight
        self._forward_impl: Callable[..., Tensor] = F.linear

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [..., in] -> ([..., out], None: no bias)."""
        return self._forward_impl(input=x, weight=self.weight), None
