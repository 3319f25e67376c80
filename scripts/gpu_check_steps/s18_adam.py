"""Adam in one kernel and in torch's usual form: equal updates, seconds, and memory beside parameters and state."""

from __future__ import annotations

from typing import Any

import step_outcome
import torch
from models import off_by


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """Three steps on float32 parameters of uneven sizes; the seconds are the last one's."""
    from megatron_rl.device import Device, release_cached, settled_seconds

    one = Device(device)
    sizes = [3001, 64 * 1024, 17, 1 << 20] if small else [1 << 28, 3001, 1 << 27, 17, 1 << 24]
    after: dict[str, list[torch.Tensor]] = {}
    for name in ("fused", "foreach"):
        generator = torch.Generator(device).manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(size, generator=generator, device=device)) for size in sizes]
        adam = torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.01, fused=name == "fused", foreach=name == "foreach")
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator, device=device)
        adam.step()  # makes the moments
        adam.step()
        one.reset_peak_memory()
        held = torch.cuda.memory_allocated() if device == "cuda" else 0
        start = settled_seconds(one.torch_device)
        adam.step()
        seconds, peak = settled_seconds(one.torch_device) - start, one.peak_memory_bytes()
        beside = None if peak is None else round((peak - held) / 2**20, 1)
        figures[name] = {"seconds": round(seconds, 5), "beside, MiB": beside}
        after[name] = [weight.detach()[:: max(1, len(weight) // 1000)].clone() for weight in weights]
        del weights, adam, weight
        release_cached(one.torch_device)
    figures["parameters"] = sum(sizes)
    for fused, usual in zip(after["fused"], after["foreach"], strict=True):
        assert off_by(fused, usual) < 1e-5, "the two forms update differently"


if __name__ == "__main__":
    step_outcome.main(run)
