"""What is recorded of runs for the pictures of the docs: small JSON files in docs/pictures/data.

Numbers have 4 digits: more cannot be seen in a picture.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from demo_record import panel_metrics

from megatron_rl.trials.trial import read_metrics

DATA = Path(__file__).parents[2] / "docs/pictures/data"
REWARD, ACCURACY = "critic/score/mean", "/acc/mean@1"
MASSES, LOSS = ("distillation/teacher_mass", "distillation/student_mass"), "distillation/loss"
STAGES = ("/acc/mean@1", "/rm_score/mean@1", "reward/rm_score/mean", "actor/reward_kl_penalty")
DIGITS = 4
NUM_GPUS = 32


def rounded(value: Any) -> Any:
    """Return JSON with all its numbers of `DIGITS` significant digits."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def curves(folders: Sequence[Path]) -> Any:
    """Return the metrics that `curves.png` of a run shows, a dictionary for each step."""
    [folder] = folders
    steps = read_metrics(folder / "metrics.jsonl")
    kept = [panel_metrics({"step": step} | values) for step, values in steps.items()]
    accuracies = ({name: value for name, value in values.items() if _is_accuracy(name)} for values in steps.values())
    return [one | accuracy for one, accuracy in zip(kept, accuracies, strict=True)]


def _is_accuracy(name: str) -> bool:
    return name.startswith("val-core/") and not name.endswith("/std")


def recipes(folders: Sequence[Path]) -> Any:
    """Return name of a run -> its mean reward and its held-out accuracy by step, and its seconds."""
    found = {}
    for folder in folders:
        steps = read_metrics(folder / "metrics.jsonl")
        found[folder.name] = {
            "reward": {step: values[REWARD] for step, values in steps.items() if REWARD in values},
            "accuracy": {step: one for step, values in steps.items() if (one := _ending(values, ACCURACY)) is not None},
            "seconds": json.loads((folder / "summary.json").read_text())["wall_s"],
        }
    return found


def _ending(values: dict[str, float], end: str) -> float | None:
    return next((value for name, value in values.items() if name.endswith(end)), None)


def distillation(folders: Sequence[Path]) -> Any:
    """Return step -> mass of teacher and student on the teacher's top-k, and loss."""
    [folder] = folders
    names = (*MASSES, LOSS)
    steps = read_metrics(folder / "metrics.jsonl")
    return {step: {name: values[name] for name in names} for step, values in steps.items() if LOSS in values}


def stages(folders: Sequence[Path]) -> Any:
    """Return step of PPO -> accuracy, scores of the reward model, and KL."""
    [folder] = folders
    steps = read_metrics(folder / "metrics.jsonl")
    return {
        step: {name: value for name, value in values.items() if name.endswith(STAGES)} for step, values in steps.items()
    }


def timeline(folders: Sequence[Path]) -> Any:
    """Return (lane, phase, start, stop) of the calls of a run's last steps, in seconds from the first."""
    [folder] = folders
    calls = json.loads((folder / "timeline.json").read_text())
    first = min(call["start"] for call in calls)
    return [
        [call["lane"], call["name"], *(round(call[edge] - first, 4) for edge in ("start", "stop"))] for call in calls
    ]


def layouts(folders: Sequence[Path]) -> Any:
    """Return what `megatron-rl map --picture` shows of 32 H100. folders: (the configuration's file,)."""
    from megatron_rl.planning.hardware import planned_hardware
    from megatron_rl.planning.layout_search.map_picture import DrawnLayout
    from megatron_rl.planning.layout_search.request import MapRequest, cluster_of, read_base
    from megatron_rl.planning.layout_search.search_result import find_placements
    from megatron_rl.planning.run_plan import mean_lengths

    [file] = folders
    reading, run, keeps = read_base(file, [])
    cluster = cluster_of(run, NUM_GPUS, None, keeps)
    hardware = planned_hardware(run, None, cluster.num_nodes)
    lengths = mean_lengths(run.data)
    request = MapRequest(file, (), reading.settings, run, hardware, cluster, keeps, lengths, None)
    return [asdict(DrawnLayout.of(candidate)) for candidate in find_placements(request).candidates]


RECORDS: dict[str, Callable[[Sequence[Path]], Any]] = {
    "real": curves,
    "recipes": recipes,
    "distillation": distillation,
    "rlhf_stages": stages,
    "timeline": timeline,
    "async_timeline": timeline,
    "map": layouts,
}
"""Name of a record -> the function that makes it of the folders of runs."""


def read(name: str) -> Any:
    """Return a record."""
    return json.loads((DATA / f"{name}.json").read_text())


def write(name: str, folders: Sequence[Path]) -> Path:
    """Record runs. Returns the record's file."""
    file = DATA / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    content = rounded(RECORDS[name](folders))
    items = (
        (f"{json.dumps(str(key))}: {json.dumps(one)}" for key, one in content.items())
        if isinstance(content, dict)
        else ()
    )
    lines = [*items] or [json.dumps(one) for one in content]
    edges = "{}" if isinstance(content, dict) else "[]"
    file.write_text(f"{edges[0]}\n" + ",\n".join(lines) + f"\n{edges[1]}\n")
    return file
