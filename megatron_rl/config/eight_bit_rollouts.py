"""Keys of rollouts that read weights in 8 bits. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from megatron_rl.config.constraints import OURS, AtMost, OneOf

FP8 = "fp8"
SMALLEST_BLOCK = 16
"""Below it scales would take more than a fiftieth of the codes."""


@dataclass
class EightBitRollouts:
    """Part of the group `rollout`."""

    quantization: Annotated[str | None, OneOf((FP8,))] = None
    """fp8: linears of attention and MLPs, and experts, are served as e4m3 codes with one scale for each square block of
    the weight, and half their bytes cross to generation | null: weights are served as they are trained."""
    quantization_block_size: Annotated[int, Ge(SMALLEST_BLOCK), AtMost(2**16), OURS] = 128
    """Rows and columns of such a block. Every cut of tensor parallelism must lie between two blocks."""
