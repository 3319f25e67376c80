"""The same training with other choices, each a short run: tokens a second, and the largest moment of an update."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from short_run import ShortRun, rate

import step_outcome  # isort: skip

OVERRIDE = "actor_rollout_ref.actor.megatron.override_transformer_config"
VARIANTS = {
    "plain": (),
    "fused weight gradients": (f"{OVERRIDE}.gradient_accumulation_fusion=true",),
    "recompute": (
        f"{OVERRIDE}.recompute_granularity=full",
        f"{OVERRIDE}.recompute_method=uniform",
        f"{OVERRIDE}.recompute_num_layers=1",
    ),
    "Adam on the host": ("actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=true",),
}
CLOSE = 0.05


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """Six steps each; losses stay close to those of the plain run."""
    sizes, folder = replace(ShortRun.of(device, small), steps=6), Path(tempfile.mkdtemp())
    config, last = sizes.write(folder), {}
    for number, (name, overrides) in enumerate(VARIANTS.items()):
        steps = sizes.train(config, folder / str(number), overrides)
        last[name] = steps[-1]["actor/loss"]
        figures[name] = {
            "tokens/s": round(rate(steps), 1),
            "update, GB": round(max(one["perf/memory_gb/update_actor"] for one in steps), 3),
            "last loss": round(last[name], 4),
        }
        assert abs(last[name] - last["plain"]) < CLOSE * last["plain"], f"{name}: {last}"


def rehearse(figures: dict[str, Any]) -> None:
    """Run one rank with the GPU's sizes, but for layers, on a CPU."""
    for name, overrides in VARIANTS.items():
        figures[name] = replace(ShortRun.of("cuda", False), layers=2).rehearse(overrides)


if __name__ == "__main__":
    step_outcome.main(run)
