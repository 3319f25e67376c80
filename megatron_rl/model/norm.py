"""RMSNorm that works with sequence parallelism and on any device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dim (Zhang and Sennrich, arXiv:1910.07467).

    Megatron's torch norm refuses sequence parallelism; here the weight carries the mark that makes
    `finalize_model_grads` sum its gradient over TP ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        weight: Any = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        weight.sequence_parallel = config.sequence_parallel
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] -> same shape."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
