"""The real path without Ray and vLLM: supervised fine-tuning that learns, saves and goes on; tokens a second."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from short_run import ShortRun, rate

import step_outcome  # isort: skip

LEARNT = 0.8
"""Share of the first loss that the last one may have."""


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """Twelve steps with a checkpoint in the middle, and its second half again from there."""
    sizes, folder = ShortRun.of(device, small), Path(tempfile.mkdtemp())
    config, middle = sizes.write(folder), sizes.steps // 2
    whole = sizes.train(config, folder / "whole", [f"trainer.save_freq={middle}", "trainer.max_ckpt_to_keep=2"])
    losses = [one["actor/loss"] for one in whole]
    figures["losses"] = [round(loss, 4) for loss in losses]
    figures["tokens/s"] = round(rate(whole), 1)
    figures["seconds a step"] = round(sorted(one["timing_s/step"] for one in whole)[len(whole) // 2], 4)
    if device == "cuda":
        figures["share of an H100's peak"] = round(share_of_peak(folder / "model", rate(whole)), 3)
    saved = [
        f"trainer.resume_from_path={folder / 'whole' / f'global_step_{middle}'}",
        "trainer.resume_mode=resume_path",
    ]
    again = [one["actor/loss"] for one in sizes.train(config, folder / "again", saved)]
    assert len(again) == sizes.steps - middle, f"{len(again)} steps after the checkpoint of step {middle}"
    apart = max(abs(a - b) / b for a, b in zip(again, losses[middle:], strict=True))
    figures["resumed, off by"] = f"{apart:.1e}"
    assert losses[-1] < LEARNT * losses[0], f"the loss went from {losses[0]} to {losses[-1]}"
    assert apart <= (0.0 if device == "cpu" else 0.02), f"resumed losses are off by {apart}"


def share_of_peak(model: Path, tokens_per_s: float) -> float:
    """Six FLOPs a parameter and token, as a share of an H100's dense bfloat16 peak."""
    from megatron_rl.planning.hardware import load_hardware

    num_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return 6 * num_bytes / 2 * tokens_per_s / load_hardware("h100").bfloat16_flops


def rehearse(figures: dict[str, Any]) -> None:
    """Run one rank with the GPU's sizes on a CPU."""
    figures["rehearsed, GB"] = ShortRun.of("cuda", False).rehearse()


if __name__ == "__main__":
    step_outcome.main(run)
