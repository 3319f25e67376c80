"""The vocabulary's weight gradient, added up over chunks of tokens, against float64: with a float32 sum in the kernel
and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import step_outcome
import torch
from models import added_up, off_by


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """Error of 32 chunks, seconds of one, bfloat16. A CPU has no product with a float32 sum of 16-bit factors."""
    from megatron_rl.model.log_probs import add_product_in_float32

    tokens, hidden, vocab = (32, 64, 512) if small else (896, 4096, 32000)
    generator = torch.Generator(device).manual_seed(0)
    parts = [
        [torch.randn(tokens, size, generator=generator, device=device).bfloat16() for size in (vocab, hidden)]
        for _ in range(4)
    ]
    expected = 8 * sum((grad.double().t() @ states.double() for grad, states in parts), start=torch.zeros(()))
    forms = {"ours": add_product_in_float32, "in two steps": lambda total, a, b: total.add_(torch.mm(a, b))}
    for name, form in forms.items():

        def add(total: torch.Tensor, form: Callable[..., Any] = form) -> None:
            for grad, states in parts:
                form(total, grad.t(), states)

        total, seconds = added_up(add, (vocab, hidden), device, 8)
        error = off_by(total, expected)
        figures[name] = f"off by {error:.1e}, {seconds / len(parts):.5f} s a chunk"
        assert error < 0.01, f"{name}: off by {error}"


if __name__ == "__main__":
    step_outcome.main(run)
