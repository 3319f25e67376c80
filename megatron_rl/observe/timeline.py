"""The picture of a run's last steps: one row for each pool, and one for the driver, with the phases that ran."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_rl.observe.colors import INK, LABEL, text_color
from megatron_rl.observe.curves import TITLE, save_figure
from megatron_rl.observe.phase_clock import DRIVER, PhaseRun
from megatron_rl.observe.phases import phase_color

LETTER = 0.0050
"""Width of a letter in a bar, as a share of the width: a bar that is wide enough for its name carries it."""
VISIBLE = 0.001
"""Least share of the width, of all bars of a phase together, from which the legend has the phase."""


def rows_of(intervals: Sequence[PhaseRun]) -> list[str]:
    """The rows from top to bottom: pools as they first appear, then the driver."""
    return sorted(dict.fromkeys(interval.lane for interval in intervals), key=lambda row: row == DRIVER)


def _phases(intervals: Sequence[PhaseRun]) -> list[str]:
    return list(dict.fromkeys(interval.name for interval in intervals))


def draw_timeline(intervals: Sequence[PhaseRun]) -> Figure:
    """Draw at least one interval, in seconds from the first start."""
    names = rows_of(intervals)
    first, last = min(interval.start for interval in intervals), max(interval.stop for interval in intervals)
    figure = Figure(figsize=(11, 1.2 + 0.55 * len(names)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for interval in intervals:
        row, start, width = names.index(interval.lane), interval.start - first, interval.stop - interval.start
        color = phase_color(interval.name)
        axes.barh(row, width, left=start, height=0.62, color=color, edgecolor="white", linewidth=0.4)
        if width > LETTER * (len(interval.name) + 1) * (last - first):
            look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7, "color": text_color(color)}
            axes.text(start + width / 2, row, interval.name, **look)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, last - first)
    axes.set_xlabel("seconds", color=LABEL)
    axes.set_title("The last steps, by pool", **TITLE)
    axes.tick_params(colors=INK, labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    seconds = {
        phase: sum(one.stop - one.start for one in intervals if one.name == phase) for phase in _phases(intervals)
    }
    phases = [phase for phase, spent in seconds.items() if spent >= VISIBLE * (last - first)]
    handles = [Patch(color=phase_color(phase), label=phase) for phase in phases]
    figure.legend(handles=handles, loc="outside lower center", ncols=7, fontsize=7, frameon=False)
    return figure


def plot_timeline(intervals: Sequence[PhaseRun], output_png: Path) -> None:
    """Draw intervals to a file; without any, write none. Raises OSError."""
    if intervals:
        save_figure(draw_timeline(intervals), output_png)
