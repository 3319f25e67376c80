"""What the plan says of every phase, beside what torch and the driver say of the same run."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from short_run import ShortRun, metrics

import step_outcome  # isort: skip

MEASURED, PLANNED = "perf/memory_gb/", "perf/memory_planned_gb/"
SHARE, ROOM_GB = 0.1, 0.2
"""A phase may need so much more than planned."""


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """Four steps in this process. On a CPU only what the project owns is measured and planned."""
    from megatron_rl.cli.tasks import sft_command
    from megatron_rl.planning.hardware import load_hardware

    sizes, folder = replace(ShortRun.of(device, small), steps=4), Path(tempfile.mkdtemp())
    config = sizes.write(folder)
    sft_command(config, [f"trainer.default_local_dir={folder / 'out'}", "trainer.save_freq=4"], local=True)
    steps = metrics(folder / "out")
    phases = sorted({name.removeprefix(MEASURED) for one in steps for name in one if name.startswith(MEASURED)})
    for phase in phases:
        measured, planned = (max(one.get(kind + phase, 0.0) for one in steps) for kind in (MEASURED, PLANNED))
        figures[f"{phase}, GB"] = {"measured": round(measured, 4), "planned": round(planned, 4)}
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        figures["GB"] = {
            "max_memory_allocated": round(torch.cuda.max_memory_allocated() / 1e9, 3),
            "max_memory_reserved": round(torch.cuda.max_memory_reserved() / 1e9, 3),
            "outside of torch": round((total - free - torch.cuda.memory_reserved()) / 1e9, 3),
            "planned outside of torch": load_hardware("h100").context_bytes / 1e9,
        }
    assert phases, "no phase was measured"
    for name, both in figures.items():
        if "planned" in both and both["planned"]:
            most = both["planned"] * (1 + SHARE) + ROOM_GB
            assert both["measured"] <= most, f"{name}: {both}, which is more than {most:.3f}"


def rehearse(figures: dict[str, Any]) -> None:
    """Run one rank with the GPU's sizes on a CPU; `sft` does it with all layers."""
    figures["rehearsed, GB"] = replace(ShortRun.of("cuda", False), layers=2).rehearse(["trainer.save_freq=4"])


if __name__ == "__main__":
    step_outcome.main(run)
