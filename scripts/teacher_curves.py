"""Draw docs/pictures/distillation.png from a run with a loss over the top-k.

    python scripts/teacher_curves.py outputs/distill

Left: what teacher and student give to the teacher's likeliest tokens. Right: the loss.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from megatron_rl.observe.curves import COLORS, FAINT, INK, TITLE
from megatron_rl.trials.metrics_file import read_metrics

PICTURE = Path(__file__).parents[1] / "docs/pictures/distillation.png"
MASSES = {"distillation/teacher_mass": ("the teacher", FAINT), "distillation/student_mass": ("the student", COLORS[0])}
LOSS = "distillation/loss"


def main() -> None:
    """Write the picture."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    steps = {
        step: values for step, values in read_metrics(Path(sys.argv[1]) / "metrics.jsonl").items() if LOSS in values
    }
    figure = Figure(figsize=(9, 2.8), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, (label, color) in MASSES.items():
        left.plot(list(steps), [values[name] for values in steps.values()], color=color, linewidth=2, label=label)
    left.set_title("given to the teacher's likeliest tokens", **TITLE)
    left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
    left.legend(frameon=False, labelcolor=INK, fontsize=8.5)
    right.plot(list(steps), [values[LOSS] for values in steps.values()], color=COLORS[0], linewidth=2)
    right.set_title("loss of a token", **TITLE)
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel("step", color=INK, fontsize=8.5)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
        axes.grid(axis="y", color=FAINT, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        axes.tick_params(colors=INK, labelsize=8.5, length=0)
    FigureCanvasAgg(figure).print_png(PICTURE)


if __name__ == "__main__":
    main()
