"""The picture of an evaluation: pass@k and maj@k of each source over k, with their intervals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter, ScalarFormatter

from megatron_rl.observe.colors import FAINT, INK, LABEL
from megatron_rl.observe.curves import COLORS, PANEL, TITLE, save_figure

KINDS = {"pass": "-", "maj": "--"}


def plot_evaluation(table: Mapping[str, Mapping[str, Any]], output_png: Path) -> None:
    """Draw the result of `evaluation_table`; sources without an accuracy have their mean reward in words alone."""
    figure = Figure(figsize=(1.6 * PANEL[0], 1.3 * PANEL[1]), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (source, values) in enumerate(table.items()):
        color = COLORS[number % len(COLORS)]
        for kind, style in KINDS.items():
            points = [
                (int(name.partition("@")[2]), value) for name, value in values.items() if name.startswith(f"{kind}@")
            ]
            if not points:
                continue
            counts, estimates = zip(*points, strict=True)
            heights = [estimate.value for estimate in estimates]
            below = [max(0.0, estimate.value - estimate.low) for estimate in estimates]
            above = [max(0.0, estimate.high - estimate.value) for estimate in estimates]
            axes.errorbar(
                counts,
                heights,
                yerr=(below, above),
                fmt=f"o{style}",
                color=color,
                capsize=3,
                markersize=4,
                label=f"{source}: {kind}@k of {values['prompts']} prompts",
            )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("k, responses to a prompt", color=LABEL)
    axes.set_title("Evaluation, with 95% intervals", **TITLE)
    axes.grid(axis="y", color=FAINT, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=8.5)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8.5)
    save_figure(figure, output_png)
