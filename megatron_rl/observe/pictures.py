"""One look for all PNG pictures, and the small ones: a run's last steps, and pass@k of an evaluation."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter, PercentFormatter, ScalarFormatter

from megatron_rl.observe.appended_file import replace_file
from megatron_rl.observe.phase_clock import DRIVER, PhaseRun
from megatron_rl.observe.picture_style import FAINT, INK, LABEL, phase_color, text_color

TITLE: dict[str, Any] = {"loc": "left", "fontsize": 10.5, "fontweight": "bold", "color": INK}
COLORS = ("#0b7a75", "#d1495b", "#edae49", "#30638e", "#7b6d8d", "#8cb369", "#c97b63", "#5c6b73", "#b5a642")
SMALL = 8.5
"""Size of the text at axes and in legends."""
LETTER = 0.0050
"""Width of a letter in a bar, as a share of the width: a bar that is wide enough for its name carries it."""
VISIBLE = 0.001
"""Least share of the width, of all bars of a phase together, from which the legend has the phase."""
KINDS = {"pass": "-", "maj": "--"}

Bar = tuple[int, str, float, float]
"""Row, phase, start, stop."""


def new_figure(width: float, height: float, layout: Any = "constrained") -> Figure:
    """Return an empty figure. width, height: inches. layout: matplotlib's, or None."""
    return Figure(figsize=(width, height), dpi=130, layout=layout)


def dress(axes: Axes, grid: Literal["x", "y"] = "y", size: float = SMALL) -> None:
    """Set the frame of a panel. grid: "y" for values over steps; "x" for bars in rows, whose names are at the left."""
    axes.grid(axis=grid, color=FAINT, alpha=0.25)
    axes.set_axisbelow(True)
    hidden = ["top", "right"] + (["left"] if grid == "x" else [])
    axes.spines[hidden].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=size)
    if grid == "x":
        axes.tick_params(length=0)


def encoded(figure: Figure, kind: str = "png") -> bytes:
    """Return a picture's file. kind: as the name of a file ends."""
    content = io.BytesIO()
    figure.savefig(content, format=kind)
    return content.getvalue()


def save_figure(figure: Figure, output_png: Path) -> None:
    """Write a PNG in place of an earlier one, and make its folder. Raises OSError."""
    output_png.parent.mkdir(parents=True, exist_ok=True)
    replace_file(output_png, encoded(figure))


def draw_bars(axes: Axes, rows: Sequence[str], bars: Iterable[Bar], end: float, size: float = SMALL) -> None:
    """Draw phases from 0 to `end` seconds, named in their bars where there is room. rows: their names, from the top."""
    for row, phase, start, stop in bars:
        width, color = stop - start, phase_color(phase)
        axes.barh(row, width, left=start, height=0.7, color=color, edgecolor="white", linewidth=0.4)
        if width > LETTER * (len(phase) + 1) * end:
            look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7, "color": text_color(color)}
            axes.text(start + width / 2, row, phase, **look)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, end)
    dress(axes, "x", size)


def phase_legend(figure: Figure, phases: Sequence[str]) -> None:
    """Put the colours of phases below a figure."""
    handles = [Patch(color=phase_color(phase), label=phase) for phase in phases]
    figure.legend(handles=handles, loc="outside lower center", ncols=7, fontsize=7.5, frameon=False)


def draw_timeline(intervals: Sequence[PhaseRun]) -> Figure:
    """Draw at least one interval, in seconds from the first start: pools as they first appear, then the driver."""
    names = sorted(dict.fromkeys(one.lane for one in intervals), key=lambda row: row == DRIVER)
    first, last = min(one.start for one in intervals), max(one.stop for one in intervals)
    figure = new_figure(11, 1.2 + 0.55 * len(names))
    axes = figure.subplots()
    bars = [(names.index(one.lane), one.name, one.start - first, one.stop - first) for one in intervals]
    draw_bars(axes, names, bars, last - first)
    axes.set_xlabel("seconds", color=LABEL)
    axes.set_title("The last steps, by pool", **TITLE)
    seconds: dict[str, float] = {}
    for _, phase, start, stop in bars:
        seconds[phase] = seconds.get(phase, 0.0) + stop - start
    phase_legend(figure, [phase for phase, spent in seconds.items() if spent >= VISIBLE * (last - first)])
    return figure


def plot_timeline(intervals: Sequence[PhaseRun], output_png: Path) -> None:
    """Draw intervals to a file; without any, write none. Raises OSError."""
    if intervals:
        save_figure(draw_timeline(intervals), output_png)


def plot_evaluation(table: Mapping[str, Mapping[str, Any]], output_png: Path) -> None:
    """Draw the result of `evaluation_table`: pass@k and maj@k of each source over k, with their intervals.

    A source without an accuracy has no line.
    """
    figure = new_figure(8.0, 4.03)
    axes = figure.subplots()
    for number, (source, values) in enumerate(table.items()):
        for kind, style in KINDS.items():
            points = {int(name.partition("@")[2]): one for name, one in values.items() if name.startswith(f"{kind}@")}
            if not points:
                continue
            below = [max(0.0, one.value - one.low) for one in points.values()]
            above = [max(0.0, one.high - one.value) for one in points.values()]
            axes.errorbar(
                [*points],
                [one.value for one in points.values()],
                yerr=(below, above),
                fmt=f"o{style}",
                color=COLORS[number % len(COLORS)],
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
    dress(axes)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=SMALL)
    save_figure(figure, output_png)
