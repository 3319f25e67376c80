"""A linear's weight gradient, added to the float32 buffer as it is multiplied, against float64: ours, apex's, and in
two steps."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import step_outcome
import torch
from models import added_up, off_by


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """Error after 16 micro-batches, seconds of one; bfloat16. apex's where it is installed."""
    from third_party_patches.megatron_core.fused_weight_gradient import FusedWeightGradient

    tokens, inputs, outputs = (48, 64, 96) if small else (2048, 4096, 4096)
    generator = torch.Generator(device).manual_seed(0)
    states, grad = (
        torch.randn(tokens, size, generator=generator, device=device).bfloat16() for size in (inputs, outputs)
    )
    expected = 16 * (grad.double().t() @ states.double())
    forms = {
        "ours": FusedWeightGradient.wgrad_gemm_accum_fp32,
        "in two steps": lambda states, grad, total: total.add_(grad.t() @ states),
    }
    try:
        forms["apex's"] = importlib.import_module("fused_weight_gradient_mlp_cuda").wgrad_gemm_accum_fp32
    except ImportError:
        figures["apex's"] = "not installed"
    for name, form in forms.items():
        total, seconds = added_up(partial(form, states, grad), (outputs, inputs), device, 16)
        error = off_by(total, expected)
        figures[name] = f"off by {error:.1e}, {seconds:.5f} s a micro-batch"
        assert error < 0.01, f"{name}: off by {error}"


if __name__ == "__main__":
    step_outcome.main(run)
