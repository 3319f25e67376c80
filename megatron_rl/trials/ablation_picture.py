"""The picture of an ablation: four panels with a line for each point that ran, the fastest at the top."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from megatron_rl.observe.picture_style import INK, LABEL, phase_color
from megatron_rl.observe.pictures import SMALL, TITLE, dress, new_figure, save_figure
from megatron_rl.trials.result import PHASES, REST, Result, ResultRow, by_step_time, memory_unit
from megatron_rl.trials.trial_outcome import FAILED

SHOWN_AS = {"gen": "gen", "log-probs": "old_log_prob", "update": "update_actor", "reshard": "reshard"}
"""Column of the report -> the phase whose colour it has, one of those that it adds up."""
PHASE_COLORS = {column: phase_color(SHOWN_AS[column]) for column in PHASES} | {REST: "#c3cad3"}
FAILURE = "#b3243f"
PLAIN_COLOR, BASELINE_COLOR = "#9fb0bf", "#4d6173"
WIDTHS = (3.6, 1.5, 1.9, 1.5)
ROOM = (0.12, 0.22, 0.65, 0.22)
"""Space for labels at the right of each panel, as a share of its longest bar."""
BAR = 0.68


def draw_ablation(rows: Sequence[ResultRow], baseline: str | None, output_png: Path) -> bool:
    """Write the picture. Returns False, and writes nothing, if no point has finished."""
    if not by_step_time(rows):
        return False
    save_figure(ablation_figure(rows, baseline), output_png)
    return True


def ablation_figure(rows: Sequence[ResultRow], baseline: str | None) -> Figure:
    """Draw the points, at least one of which has finished."""
    finished = by_step_time(rows)
    failed = [row for row in rows if row.outcome in FAILED]
    shown = [*finished, *failed]
    layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)
    figure = new_figure(14.0, 1.9 + 0.42 * len(shown), layout)
    panels = figure.subplots(1, 4, sharey=True, width_ratios=WIDTHS)
    results = [row.result for row in finished if row.result is not None]
    _draw_phases(panels[0], results)
    speeds = [result.tokens_per_s_per_rank for result in results]
    colors = [BASELINE_COLOR if row.name == baseline else PLAIN_COLOR for row in finished]
    _draw_bars(panels[1], "Tokens/s per rank", speeds, colors, [f"{speed:.0f}" for speed in speeds])
    unit, name = memory_unit(finished)
    received = [result.received_bytes / unit for result in results]
    times = [f"{size:.2f} in {result.exchange_s * 1e3:.0f} ms" for size, result in zip(received, results, strict=True)]
    _draw_bars(panels[2], f"Received ({name})", received, colors, times)
    memory = [result.memory_bytes / unit for result in results]
    _draw_bars(panels[3], f"Memory ({name})", memory, colors, [f"{size:.1f}" for size in memory])
    _mark_planned(panels[3], [result.planned_memory_bytes / unit for result in results])
    for place, row in enumerate(failed, start=len(finished)):
        panels[0].text(0, place, f" {row.outcome}", va="center", fontsize=SMALL, color=FAILURE, style="italic")
    base = next((row.result for row in finished if row.name == baseline), None)
    if base is not None:
        line = {"color": INK, "linestyle": (0, (3, 3)), "linewidth": 1, "zorder": 0}
        panels[0].axvline(base.step_s[0], label="baseline's step", **line)
    _name_lines(panels[0], shown, baseline)
    for axes, room in zip(panels, ROOM, strict=True):
        dress(axes, "x")
        axes.set_xlim(0, max(axes.dataLim.x1, 1e-9) * (1 + room))
        axes.xaxis.set_major_locator(MaxNLocator(5))
    figure.legend(ncols=7, frameon=False, fontsize=SMALL, loc="outside lower center")
    return figure


def _draw_phases(axes: Axes, results: Sequence[Result]) -> None:
    """Draw stacked medians of the phases, and a whisker from the fastest to the slowest step."""
    places = range(len(results))
    left = [0.0] * len(results)
    for phase, color in PHASE_COLORS.items():
        widths = [max(0.0, result.phases_s[phase]) for result in results]
        axes.barh(places, widths, BAR, left=left, color=color, label=phase, linewidth=0)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, result in zip(places, results, strict=True):
        median, low, high = result.step_s
        axes.plot([low, high], [place, place], color=INK, linewidth=1, solid_capstyle="butt")
        axes.plot([low, high], [place, place], "|", color=INK, markersize=5)
        axes.annotate(
            f"{median:.2f}",
            (max(high, left[place]), place),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL,
            color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )
    axes.set_title("Seconds per step, by phase", **TITLE)


def _draw_bars(axes: Axes, title: str, values: Sequence[float], colors: list[str], labels: list[str]) -> None:
    bars = axes.barh(range(len(values)), values, BAR, color=colors, linewidth=0)
    axes.bar_label(bars, labels, padding=4, fontsize=SMALL, color=INK)
    axes.set_title(title, **TITLE)


def _mark_planned(axes: Axes, values: Sequence[float]) -> None:
    """Draw the planned memory as a tick in each bar."""
    axes.plot(values, range(len(values)), "|", color="white", markersize=12, markeredgewidth=3)
    axes.plot(values, range(len(values)), "|", color=INK, markersize=12, markeredgewidth=1.2, label="planned memory")


def _name_lines(axes: Axes, rows: Sequence[ResultRow], baseline: str | None) -> None:
    axes.set_yticks(range(len(rows)), [_label(row, baseline) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    style: dict[str, Any] = {"ha": "right", "va": "bottom", "fontsize": SMALL, "color": LABEL}
    axes.text(-0.01, 1.01, "training \N{RIGHTWARDS ARROW} rollout", transform=axes.transAxes, **style)
    for tick, row in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("bold" if row.name == baseline else "normal")


def _label(row: ResultRow, baseline: str | None) -> str:
    return f"baseline  {row.planned.label}" if row.name == baseline else row.planned.label
