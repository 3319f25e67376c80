"""The picture of a run, drawn from its metrics.jsonl: one panel per group of metrics that the file has."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, PercentFormatter

from megatron_rl.errors import ConfigError
from megatron_rl.observe.picture_style import INK, LABEL, LINE_PANELS, STACKED, phase_color
from megatron_rl.observe.pictures import COLORS, SMALL, TITLE, dress, new_figure, save_figure

Series = dict[str, tuple[list[int], list[float]]]

COLUMNS = 3
PANEL = (5.0, 3.1)
LEFT, RIGHT, BOTTOM, TOP = 0.7, 0.2, 0.55, 0.4
LEGEND = 1.4
"""Inches: width and height of a panel, the margins of its axes, and the width of a legend at their right."""
ROUNDING = 1e-6
"""Lines whose values are all smaller show rounding alone: on a linear scale they are not drawn."""
MAY_BE_ZERO = "critic/score/mean"
LARGEST = 1e300
"""Beyond it a number is none of a run's, and axes have no room."""
LOAD_OF_LAYER = "actor/expert_load/layer_"


def plot_curves(metrics_jsonl: Path, output_png: Path) -> None:
    """Draw the metrics of `metrics_jsonl` (one object per line with "step") to `output_png`.

    Raises ConfigError if no panel has data.
    """
    save_figure(draw_curves(metrics_jsonl), output_png)


def draw_curves(metrics_jsonl: Path) -> Figure:
    """Draw the figure that `plot_curves` saves."""
    series = _read_series(metrics_jsonl)
    panels = _panels(series)
    if not panels:
        raise ConfigError(
            f"{metrics_jsonl} holds no metric that has a panel; it holds {', '.join(series) or 'nothing'}"
        )
    num_columns = min(COLUMNS, len(panels))
    num_rows = math.ceil(len(panels) / num_columns)
    figure = new_figure(PANEL[0] * num_columns, PANEL[1] * num_rows, layout=None)
    for number, draw in enumerate(panels):
        row, column = divmod(number, num_columns)
        num_cells = num_columns - column if number == len(panels) - 1 else 1
        axes = figure.add_axes(_place(figure, row, column, num_cells))
        draw(axes)
        _finish(axes)
        if _has_long_legend(axes):
            axes.set_position(_place(figure, row, column, num_cells, LEGEND))
    return figure


def _place(
    figure: Figure, row: int, column: int, num_cells: int, legend: float = 0.0
) -> tuple[float, float, float, float]:
    """The place of a panel's axes, in shares of the figure. legend: inches that stay free at their right.

    Matplotlib's own layouts measure every text, which takes longer than the drawing.
    """
    width, height = figure.get_size_inches()
    left, bottom = PANEL[0] * column + LEFT, height - PANEL[1] * (row + 1) + BOTTOM
    size = PANEL[0] * num_cells - LEFT - RIGHT - legend, PANEL[1] - BOTTOM - TOP
    return left / width, bottom / height, size[0] / width, size[1] / height


def _read_series(metrics_jsonl: Path) -> Series:
    """Steps and values per metric; a null is a gap (NaN), and what is no number of a step is left out."""
    series: Series = {}
    for line in metrics_jsonl.read_text(errors="replace").splitlines():
        try:
            record = dict(json.loads(line))
            step = int(record.pop("step"))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            continue
        for name, value in record.items():
            if value is None or (isinstance(value, int | float) and not abs(value) > LARGEST):
                steps, values = series.setdefault(name, ([], []))
                steps.append(step)
                values.append(math.nan if value is None else float(value))
    return series


def _panels(series: Series) -> list[Callable[[Axes], None]]:
    """One drawing function per panel that has data."""
    panels: list[Callable[[Axes], None]] = []
    accuracy = [name for name in series if name.startswith("val-core/") and not name.endswith("/std")]
    if accuracy:
        panels.append(lambda axes: _draw_accuracy(axes, series, accuracy))
    for title, names, scale in LINE_PANELS:
        present = {name: label for name, label in names.items() if name in series}
        if scale == "linear":
            present = {
                name: label
                for name, label in present.items()
                if name == MAY_BE_ZERO or _is_more_than_rounding(series[name][1])
            }
        if present:
            panels.append(partial(_draw_lines, series=series, title=title, names=present, scale=scale))
    loads = sorted(int(name.removeprefix(LOAD_OF_LAYER)) for name in series if name.startswith(LOAD_OF_LAYER))
    if len(loads) > 1:
        panels.append(lambda axes: _draw_loads(axes, series, loads))
    timed = [name.removeprefix("timing_s/") for name in series if name.startswith("timing_s/")]
    phases = [phase for phase in STACKED if phase in timed]
    if phases:
        panels.append(lambda axes: _draw_phases(axes, series, phases))
    return panels


def _is_more_than_rounding(values: Sequence[float]) -> bool:
    """Return True for values one of which differs from 0 by more than rounding; a gap is none."""
    return any(abs(value) >= ROUNDING for value in values)


def _draw_accuracy(axes: Axes, series: Series, names: Sequence[str]) -> None:
    for name, color in zip(names, cycle(COLORS), strict=False):
        steps, values = series[name]
        label = name.removeprefix("val-core/")
        axes.plot(steps, values, color=color, marker="o", markersize=4, label=label if len(names) > 1 else None)
        if steps[0] == 0:
            axes.plot(steps[0], values[0], "o", markersize=8, markerfacecolor="white", markeredgecolor=color)
            _name_point(axes, f"before {values[0]:.1%}", (steps[0], values[0]), (10, -12 if values[0] > 0.1 else 8))
        if len(steps) > 1:
            _name_point(axes, f"{values[-1]:.1%}", (steps[-1], values[-1]), (0, 8), ha="right")
    axes.set_ylim(-0.06, 1.2)
    axes.set_yticks([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    title = "Held-out accuracy" if len(names) > 1 else f"Held-out accuracy: {names[0].removeprefix('val-core/')}"
    axes.set_title(title, **TITLE)


def _name_point(
    axes: Axes, text: str, point: tuple[float, float], points_away: tuple[float, float], **style: Any
) -> None:
    """Write next to a point, on white, so that lines and axes do not cross the text."""
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
    axes.annotate(text, point, points_away, textcoords="offset points", fontsize=9, color=INK, bbox=behind, **style)


def _draw_lines(axes: Axes, series: Series, title: str, names: dict[str, str], scale: str) -> None:
    for (name, label), color in zip(names.items(), cycle(COLORS), strict=False):
        steps, values = series[name]
        if scale == "log":
            values = [value if value > 0 else math.nan for value in values]
        axes.plot(steps, values, color=color, label=label if len(names) > 1 else None)
    if scale == "log":
        _whole_decades(axes)
    axes.set_title(title, **TITLE)


def _whole_decades(axes: Axes) -> None:
    """A log scale from one power of ten to another, so that both ends carry a label."""
    axes.set_yscale("log")
    low, high = axes.dataLim.intervaly
    if 0 < low <= high < math.inf:
        bottom = math.floor(math.log10(low))
        axes.set_ylim(10.0**bottom, 10.0 ** max(math.ceil(math.log10(high)), bottom + 1))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_phases(axes: Axes, series: Series, phases: Sequence[str]) -> None:
    """Stacked bars, one per step; validation is left out because it would dwarf the steps that have one."""
    floor: dict[int, float] = {}
    for phase in phases:
        steps, seconds = series[f"timing_s/{phase}"]
        heights = [0.0 if math.isnan(value) else value for value in seconds]
        bottoms = [floor.get(step, 0.0) for step in steps]
        axes.bar(steps, heights, width=1.0, bottom=bottoms, color=phase_color(phase), label=phase, linewidth=0)
        floor.update({step: low + high for step, low, high in zip(steps, bottoms, heights, strict=True)})
    axes.set_title("Seconds per step, by phase (without validation)", **TITLE)


def _draw_loads(axes: Axes, series: Series, layers: Sequence[int]) -> None:
    """One row for each layer that has experts, one column for each step; a step without a number is white."""
    columns = sorted({step for layer in layers for step in series[f"{LOAD_OF_LAYER}{layer}"][0]})
    rows_of = [series[f"{LOAD_OF_LAYER}{layer}"] for layer in layers]
    loads = [dict(zip(steps, values, strict=True)) for steps, values in rows_of]
    table = [[row.get(step, math.nan) for step in columns] for row in loads]
    edges = [column - 0.5 for column in columns] + [columns[-1] + 0.5]
    rows = [number - 0.5 for number in range(len(layers) + 1)]
    picture = axes.pcolormesh(edges, rows, table, cmap="viridis", vmin=1.0)
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers] if len(layers) <= 12 else [""] * len(layers))
    axes.set_ylabel("layer", color=LABEL)
    axes.figure.colorbar(picture, ax=axes)
    axes.set_title("Load of experts by layer: busiest over mean", **TITLE)


def _finish(axes: Axes) -> None:
    """Set what all panels share: labels, frame, legend."""
    axes.set_xlabel("step", color=LABEL)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    dress(axes)
    handles, labels = axes.get_legend_handles_labels()
    if _has_long_legend(axes):
        axes.legend(
            handles[::-1], labels[::-1], frameon=False, fontsize=SMALL, loc="upper left", bbox_to_anchor=(1.0, 1.0)
        )
    elif labels:
        axes.legend(frameon=False, fontsize=SMALL)


def _has_long_legend(axes: Axes) -> bool:
    """Return True for a legend that is placed at the right of the panel."""
    return len(axes.get_legend_handles_labels()[1]) > 4
