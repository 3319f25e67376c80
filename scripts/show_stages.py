"""Show the results of the three tasks of the demo: python scripts/show_stages.py outputs/demo_rlhf

The folder holds the runs `sft`, `reward` and `ppo`, each of which starts from the model before it. Prints one table
with a row for each task and each validation of PPO: the held-out accuracy by the rule, which trained nothing, and the
mean score of the reward model, which PPO was trained on. Draws both over PPO's steps, and the KL to the tuned model, to
`stages.png`. Where the score rises and the accuracy falls, the policy exploits answers that the reward model overrates.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table

from megatron_rl.observe.picture_style import LABEL
from megatron_rl.observe.pictures import COLORS, TITLE, dress, new_figure
from megatron_rl.observe.summary import plain_table
from megatron_rl.trials.trial import read_metrics

RUNS = ("sft", "reward", "ppo")
ACCURACY, SCORE = "/acc/mean@1", "/rm_score/mean@1"
SAMPLED, KL = "reward/rm_score/mean", "actor/reward_kl_penalty"
PICTURE = "stages.png"


@dataclass(frozen=True)
class Point:
    """A validation: PPO's step, the share of held-out questions answered rightly, the mean score of all answers."""

    step: int
    accuracy: float
    score: float


def validations(metrics: dict[int, dict[str, float]]) -> list[Point]:
    """Every validation of PPO, in the order of steps, of one data source; the first, at step 0, is of the tuned model.

    metrics: as `read_metrics` gives them. Raises ValueError where there is none.
    """
    found = []
    for step, values in sorted(metrics.items()):
        accuracies, scores = ([v for k, v in values.items() if k.endswith(end)] for end in (ACCURACY, SCORE))
        if accuracies and scores:
            found.append(Point(step, accuracies[0], scores[0]))
    if not found:
        raise ValueError(f"no validation has both ...{ACCURACY} and ...{SCORE}")
    return found


def verdict(points: list[Point], tolerance: float = 0.01) -> str:
    """Say in a sentence whether the last steps gained score at the cost of accuracy. tolerance: in accuracy."""
    best, last = max(points, key=lambda point: point.accuracy), points[-1]
    gained = f"from {points[0].accuracy:.3f} to {last.accuracy:.3f} while the mean score went from "
    course = f"held-out accuracy went {gained}{points[0].score:.2f} to {last.score:.2f}"
    if last.accuracy >= best.accuracy - tolerance:
        return f"{course}: no over-optimisation"
    lost = f"{best.accuracy:.3f} at step {best.step}, with a mean score of {best.score:.2f}"
    kind = "over-optimised" if last.score > best.score else "worse, and the score says so"
    return f"{course}; it had been {lost}: {kind}"


def table(summaries: dict[str, dict], points: list[Point]) -> Table:
    """Stages in their order. summaries: of each of `RUNS` its summary.json."""

    def seconds(name: str) -> str:
        return f"{summaries[name]['wall_s']:.0f}"

    first, last = points[0], points[-1]
    pairs = summaries["reward"]["val_last"].get("val/accuracy", math.nan)
    rows = [
        ("sft", str(summaries["sft"]["steps"]), seconds("sft"), "", f"{first.accuracy:.3f}", f"{first.score:.2f}"),
        ("reward", str(summaries["reward"]["steps"]), seconds("reward"), f"{pairs:.3f}", "", ""),
    ]
    rows += [(f"  step {p.step}", "", "", "", f"{p.accuracy:.3f}", f"{p.score:.2f}") for p in points[1:-1]]
    rows += [("ppo", str(last.step), seconds("ppo"), "", f"{last.accuracy:.3f}", f"{last.score:.2f}")]
    headings = ("after", "steps", "seconds", "pairs in order", "accuracy", "mean score")
    return plain_table("Held out: accuracy by the rule, mean score by the reward model", headings, rows)


def draw(metrics: dict[int, dict[str, float]], points: list[Point]) -> Figure:
    """Accuracy, score and KL over PPO's steps, one panel each."""
    figure = new_figure(12, 3.1)
    by_rule, by_model, drift = figure.subplots(1, 3)
    steps = [point.step for point in points]
    dots = {"marker": "o", "markersize": 4.5, "linewidth": 2}
    by_rule.plot(steps, [point.accuracy for point in points], color=COLORS[0], **dots)
    by_rule.set_ylim(0, 1.05)
    by_rule.set_title("Held-out accuracy (exact match)", **TITLE)
    _line(by_model, metrics, SAMPLED, LABEL, "samples of the step")
    by_model.plot(steps, [point.score for point in points], color=COLORS[1], label="held out, greedy", **dots)
    by_model.set_title("Mean score of the reward model", **TITLE)
    by_model.legend(frameon=False, fontsize=8.5)
    _line(drift, metrics, KL, COLORS[3], None)
    drift.set_title("KL to the SFT model, per token", **TITLE)
    for axes in (by_rule, by_model, drift):
        axes.set_xlabel("PPO step (0: the SFT model)", color=LABEL, fontsize=8.5)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
        dress(axes)
    return figure


def _line(axes: Axes, metrics: dict[int, dict[str, float]], name: str, color: str, label: str | None) -> None:
    known = {step: values[name] for step, values in sorted(metrics.items()) if name in values}
    axes.plot(list(known), list(known.values()), color=color, linewidth=1.4, label=label)


def main(arguments: list[str] | None = None) -> None:
    """Print the table and write the picture. Exits with 2 where a stage has not finished."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    files = {name: folder / name / "summary.json" for name in RUNS}
    missing = [name for name, file in files.items() if not file.is_file()]
    if missing:
        parser.error(f"{folder / missing[0]} has no summary.json: this stage has not finished")
    metrics = read_metrics(folder / "ppo" / "metrics.jsonl")
    try:
        points = validations(metrics)
    except ValueError as error:
        parser.error(f"{folder / 'ppo' / 'metrics.jsonl'}: {error}")
    console = Console()
    console.print(table({name: json.loads(file.read_text()) for name, file in files.items()}, points))
    console.print(verdict(points))
    draw(metrics, points).savefig(folder / PICTURE)
    console.print(f"written: {folder / PICTURE}")


if __name__ == "__main__":
    main()
