"""What copies for repairs cost the demo: interleaved runs with and without them, in seconds of a step and in bytes.

    python scripts/bench/copies.py [--rounds 3] [--steps 12] [key=value ...]

Prints medians with the smallest and largest run, the share of a step that the copy takes by its own clock, and the
bytes of the largest rank's copy beside those of the plan.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median

from megatron_rl.cluster.scratch import PREFIX, SEGMENTS
from megatron_rl.config.load import load_config
from megatron_rl.planning.repair_copies import copied_bytes
from megatron_rl.planning.run_models import RunModels

sys.path.insert(0, str(Path(__file__).parents[1]))
from campaigns.struck_runs import LOCAL, REPOSITORY, StruckRun, records  # noqa: E402

CONFIG = REPOSITORY / "configs/demo_cpu.yaml"
WARM_UP = 2
"""First steps of a run, which build what later ones have."""
KEYS = ("trainer.val_before_train=false", "trainer.test_freq=0", "trainer.export_hf=false", "trainer.max_repairs=1")


def tensor_bytes(file: Path) -> int:
    """Bytes of a file of safetensors without its header."""
    with file.open("rb") as content:
        header = int.from_bytes(content.read(8), "little")
    return file.stat().st_size - 8 - header


def rank_bytes(run: StruckRun) -> int:
    """Bytes of the largest rank's files of one step."""
    run.family()
    sizes: Counter[tuple[str, str]] = Counter()
    for run_id in run.run_ids:
        for file in SEGMENTS.glob(f"{PREFIX}{run_id}-copy-*"):
            if (match := re.search(r"copy-\w+-0-(\d+)-(\d+)-.*-(weights|optimizer)$", file.name)) is not None:
                sizes[match[1], match[2]] += tensor_bytes(file)
    return max(sizes.values(), default=0)


def run_once(out: Path, keys: list[str]) -> tuple[float, float, int]:
    """Median seconds of a step and of its copy, and the bytes of a copy."""
    run = StruckRun("full demo", out / "run", out / "log", LOCAL, *KEYS, *keys)
    run.wait_until(lambda: len(run.steps()) >= WARM_UP + 1)
    num_bytes = rank_bytes(run)
    run.succeed()
    lines = records(out / "run" / "metrics.jsonl")[WARM_UP:]
    copies = [line["repair/copy_seconds"] for line in lines if "repair/copy_seconds" in line]
    return median(line["timing_s/step"] for line in lines), median(copies) if copies else 0.0, num_bytes


def planned_bytes(keys: list[str]) -> int:
    """Bytes that the largest rank copies by the plan."""
    return max(copied_bytes(pool) for pool in RunModels(load_config(CONFIG, keys)).pools.values())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    out, keys = (
        Path(tempfile.mkdtemp(prefix="copies_")),
        [*given.overrides, f"trainer.total_training_steps={given.steps}"],
    )
    seconds: dict[str, list[float]] = {"1": [], "-1": []}
    copies, num_bytes = [], 0
    for number in range(given.rounds):
        for freq, known in seconds.items():
            folder = out / f"{number}_{freq}"
            folder.mkdir()
            step, copy, size = run_once(folder, [*keys, f"trainer.copy_freq={freq}"])
            known.append(step)
            copies += [copy] if copy else []
            num_bytes = max(num_bytes, size)
    for freq, known in seconds.items():
        print(f"copy_freq={freq:>2}: {median(known):.3f} s a step ({min(known):.3f} to {max(known):.3f})")
    step = median(seconds["-1"])
    print(f"a copy takes {median(copies) * 1000:.0f} ms, {median(copies) / step:.1%} of a step")
    print(f"steps with copies / without: {median(seconds['1']) / step:.3f}")
    print(json.dumps({"bytes of a rank": num_bytes, "planned": planned_bytes(given.overrides)}))


if __name__ == "__main__":
    main()
