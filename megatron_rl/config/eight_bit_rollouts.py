"""Keys of FP8 rollouts: generation with FP8 weights. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from megatron_rl.config.constraints import OURS, AtMost, OneOf

FP8 = "fp8"
SMALLEST_BLOCK = 16
"""Smallest block: below it the scales would take more than a fiftieth of the FP8 weights."""


@dataclass
class EightBitRollouts:
    """Part of the group `rollout`."""

    quantization: Annotated[str | None, OneOf((FP8,))] = None
    """fp8: generate with FP8 weights (e4m3, one scale per square block) in the linears of attention and MLPs and in
    experts; half their bytes are transferred | null: generate with the weights as they are trained."""
    quantization_block_size: Annotated[int, Ge(SMALLEST_BLOCK), AtMost(2**16), OURS] = 128
    """quantization=fp8: rows and columns of a block with one scale. Tensor parallelism must cut weights between
    blocks."""
