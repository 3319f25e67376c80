"""Is the map's choice right on this machine? Profile it, place the demo, run the choice, others and a grid of layouts.

    python scripts/check_map.py [--folder outputs/check_map] [--rounds 3] [--sample 5] [--time-limit 300]

FOLDER/hardware.yaml is measured unless it is there. FOLDER/check.yaml is an ablation of `map`'s choice, of placements
drawn at random, of the layouts of configs/ablation.yaml, and of some with context parallelism; each is run once a
round, in rounds over all. The report, FOLDER/ablation/ablation.md, says Kendall's tau, the median error and the regret.
The same command goes on from where it was stopped.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import yaml

CONFIG, GRID = "configs/demo_cpu.yaml", "configs/ablation.yaml"
RANKS, STEPS, WARM_UP = 4, 14, 4
CACHE = "actor_rollout_ref.rollout.kv_cache_memory_bytes"
"""The search decides it, so that it is no kept value."""
MEGATRON = "actor_rollout_ref.actor.megatron"
CUT_SEQUENCES = ((1, 1, 2), (1, 2, 2), (2, 1, 2))
"""TP, PP and CP of the further layouts; a rank generates alone."""


def run(*arguments: str) -> int:
    """The command line of this package; its exit code."""
    return subprocess.run([sys.executable, "-m", "megatron_rl", *arguments], check=False).returncode


def layouts_of_context() -> list[dict[str, str | int]]:
    """Layouts with context parallelism, as points of an ablation."""
    return [
        {
            "name": f"tp{tp}-pp{pp}-cp{cp}-rollout_tp1",
            f"{MEGATRON}.tensor_model_parallel_size": tp,
            f"{MEGATRON}.pipeline_model_parallel_size": pp,
            f"{MEGATRON}.context_parallel_size": cp,
            "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        }
        for tp, pp, cp in CUT_SEQUENCES
    ]


def write_check(folder: Path, hardware: Path, num_rounds: int, time_limit_s: float) -> Path:
    """The grid's ablation with the points of `map`'s, on this machine's hardware."""
    content = yaml.safe_load(Path(GRID).read_text())
    points = yaml.safe_load((folder / "points.yaml").read_text())["points"]
    all_points = [*content["points"], *layouts_of_context(), *points]
    content |= {"points": all_points, "chosen": points[0]["name"], "hardware": str(hardware), "repeats": num_rounds}
    content |= {"warmup_steps": WARM_UP, "time_limit_s": time_limit_s, "folder": str(folder / "ablation")}
    content["overrides"] |= {"trainer.total_training_steps": STEPS}
    file = folder / "check.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def main() -> int:
    """Profile, map, ablate; the first exit code that is not 0, or 0."""
    parser = argparse.ArgumentParser(description="Is the map's choice right on this machine?")
    parser.add_argument("--folder", type=Path, default=Path("outputs/check_map"))
    parser.add_argument("--rounds", type=int, default=3, help="runs of each point")
    parser.add_argument("--sample", type=int, default=5, help="random placements")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds of one run")
    given = parser.parse_args()
    hardware = given.folder / "hardware.yaml"
    if not hardware.is_file():
        code = run("profile", "--ranks", str(RANKS), "--hardware-file", str(hardware))
        if code:
            return code
    grid = yaml.safe_load(Path(GRID).read_text())
    kept = [f"{key}={value}" for key, value in grid["overrides"].items() if key != CACHE]
    lengths = [f"--{name}-length={grid[f'{name}_length']}" for name in ("prompt", "response")]
    placing = ["map", "--config", CONFIG, "--gpus", str(RANKS), "--hardware", str(hardware), *lengths]
    placing += ["--points", str(given.folder / "points.yaml"), "--sample", str(given.sample), "--keep", *kept]
    code = run(*placing)
    if code:
        return code
    check = write_check(given.folder, hardware, given.rounds, given.time_limit)
    return run("ablate", "--config", str(check))


if __name__ == "__main__":
    sys.exit(main())
