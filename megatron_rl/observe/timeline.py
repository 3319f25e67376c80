"""The picture of a run's last steps: when each pool, and the driver, did what. One lane for each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_rl.observe.curves import FAINT, INK, TITLE
from megatron_rl.observe.phase_clock import DRIVER, PhaseRun
from megatron_rl.observe.phases import phase_color

SHORTEST_LABEL = 0.06
"""Share of the width from which a bar carries its name."""


def lanes(ran: Sequence[PhaseRun]) -> list[str]:
    """The lanes from top to bottom: pools as they first appear, then the driver."""
    pools = list(dict.fromkeys(one.lane for one in ran if one.lane != DRIVER))
    return pools + ([DRIVER] if any(one.lane == DRIVER for one in ran) else [])


def draw_timeline(ran: Sequence[PhaseRun]) -> Figure:
    """What ran when, in seconds from the first start; `ran` must not be empty."""
    names, phases = lanes(ran), list(dict.fromkeys(one.name for one in ran))
    first, last = min(one.start for one in ran), max(one.stop for one in ran)
    figure = Figure(figsize=(11, 1.2 + 0.55 * len(names)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for one in ran:
        row, start, width = names.index(one.lane), one.start - first, one.stop - one.start
        axes.barh(row, width, left=start, height=0.62, color=phase_color(one.name), edgecolor="white", linewidth=0.4)
        if width > SHORTEST_LABEL * (last - first):
            axes.text(start + width / 2, row, one.name, ha="center", va="center", fontsize=7, color="white")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, last - first)
    axes.set_xlabel("seconds", color=FAINT)
    axes.set_title("The last steps, by pool", **TITLE)
    axes.tick_params(colors=INK, labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    handles = [Patch(color=phase_color(phase), label=phase) for phase in phases]
    figure.legend(handles=handles, loc="outside lower center", ncols=7, fontsize=7, frameon=False)
    return figure


def plot_timeline(ran: Sequence[PhaseRun], output_png: Path) -> None:
    """Draw `ran` to a file; nothing where nothing ran. Raises OSError."""
    if ran:
        draw_timeline(ran).savefig(output_png)
