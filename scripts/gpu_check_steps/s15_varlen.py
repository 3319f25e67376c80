"""Attention within the segments of a packed row, forward and backward, against float64: grouped heads, windows, odd
lengths."""

from __future__ import annotations

from itertools import product
from typing import Any

import step_outcome
import torch
from models import both_ways, off_by

CASES = list(product(((8, 8, 64), (8, 2, 64), (8, 1, 128)), (None, 1, 48)))
"""((heads, key heads, size of a head), window)."""


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """Largest error of output and gradients, as share of the largest one; bfloat16. A CPU has the padded form alone."""
    from megatron_rl.device import has_varlen_attention
    from megatron_rl.model.attention import bucketed, varlen
    from megatron_rl.model.block_attention import AttentionKind
    from megatron_rl.model.segments import Segments

    lengths = (1, 7, 33, 130, 64) if small else (1, 7, 33, 1025, 130, 2000, 64, 513)
    segments = Segments.of(lengths, torch.device(device))
    generator = torch.Generator(device).manual_seed(0)
    for (heads, keys, head_size), window in CASES:
        shapes = [(sum(lengths), number, head_size) for number in (heads, keys, keys, heads)]
        *given, grad = (torch.randn(shape, generator=generator, device=device).bfloat16().double() for shape in shapes)
        kind = AttentionKind(window=window)
        forms = {"padded": lambda q, k, v, kind=kind: bucketed(q, k, v, segments, kind)}
        expected = both_ways(forms["padded"], given, grad)
        if has_varlen_attention(given[0].bfloat16()):
            forms["packed"] = lambda q, k, v, w=window: varlen(q, k, v, segments, w)
        for name, form in forms.items():
            found = both_ways(form, [x.bfloat16() for x in given], grad.bfloat16())
            errors = [off_by(a, b) for a, b in zip(found, expected, strict=True)]
            figures[f"{name}, heads {heads}/{keys}x{head_size}, window {window}"] = f"{max(errors):.1e}"
            assert max(errors) < 0.03, f"{name}, heads {heads}/{keys}, window {window}: off by {errors}"


if __name__ == "__main__":
    step_outcome.main(run)
