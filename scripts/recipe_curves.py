"""Draw docs/pictures/recipe_curves.png from finished runs.

    python scripts/recipe_curves.py outputs/demo outputs/grpo ...

A panel for each run: the task's mean reward at every step, and held-out accuracy where it was measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from megatron_rl.observe.curves import COLORS, FAINT, INK, TITLE
from megatron_rl.trials.metrics_file import read_metrics

PICTURE = Path(__file__).parents[1] / "docs/pictures/recipe_curves.png"
COLUMNS = 4
REWARD, ACCURACY = "critic/score/mean", "/acc/mean@1"


def read(run: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Step -> mean reward, step -> held-out accuracy."""
    rewards, accuracies = {}, {}
    for step, values in read_metrics(run / "metrics.jsonl").items():
        for name, value in values.items():
            if name == REWARD:
                rewards[step] = value
            elif name.endswith(ACCURACY):
                accuracies[step] = value
    return rewards, accuracies


def draw(axes: Axes, run: Path) -> None:
    """One run's panel."""
    rewards, accuracies = read(run)
    axes.plot(list(rewards), list(rewards.values()), color=FAINT, linewidth=1.2, label="reward of the step's samples")
    style = {"color": COLORS[0], "linewidth": 2, "marker": "o", "markersize": 4.5}
    axes.plot(list(accuracies), list(accuracies.values()), label="held-out accuracy, greedy", **style)
    first, last = min(accuracies), max(accuracies)
    title = f"{run.name}: {accuracies[first]:.3f} \N{RIGHTWARDS ARROW} {accuracies[last]:.3f}"
    axes.set_title(title, **TITLE)
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10], integer=True))
    axes.grid(axis="y", color=FAINT, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=8.5, length=0, labelbottom=True)


def main() -> None:
    """Write the picture."""
    runs = [Path(argument) for argument in sys.argv[1:]]
    if not runs:
        sys.exit(__doc__)
    num_lines = -(-len(runs) // COLUMNS)
    figure = Figure(figsize=(12, 2.5 * num_lines + 0.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(num_lines, COLUMNS, sharex=True, sharey=True, squeeze=False).flat
    for run, axes in zip(runs, panels, strict=False):
        draw(axes, run)
    handles, labels = panels[0].get_legend_handles_labels()
    for axes in panels[len(runs) :]:
        axes.set_axis_off()
    figure.legend(handles, labels, ncols=2, frameon=False, fontsize=9, loc="outside lower center")
    figure.savefig(PICTURE)


if __name__ == "__main__":
    main()
