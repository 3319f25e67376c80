"""Picture of the placements: a timeline of one step each, one row per pool, on a common scale of seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_rl.observe.colors import FAINT, INK
from megatron_rl.observe.phases import phase_color
from megatron_rl.planning.layout_search.exact_ranking import Candidate
from megatron_rl.planning.layout_search.map_report import ranks_of_pool, roles_of_pool
from megatron_rl.planning.layout_search.search_result import SearchResult

SMALL = 7.5
HEADING: dict[str, Any] = {"x": 0.01, "ha": "left", "fontsize": 10.5, "fontweight": "bold", "color": INK}
NEEDS_LATEX = "pgf"


def picture_suffixes() -> list[str]:
    """How the name of a picture may end, the usual ending first."""
    kinds = FigureCanvasAgg.get_supported_filetypes()
    return sorted((f".{kind}" for kind in kinds if kind != NEEDS_LATEX), key=lambda suffix: (suffix != ".png", suffix))


@dataclass(frozen=True)
class DrawnLayout:
    """What the picture shows of one layout.

    seconds: of its step. pools: roles and ranks of each pool. bars: (index of the pool, phase, start, stop).
    """

    seconds: float
    pools: tuple[str, ...]
    bars: tuple[tuple[int, str, float, float], ...]

    @classmethod
    def of(cls, candidate: Candidate) -> DrawnLayout:
        """Return what is shown of a candidate."""
        names = list(candidate.memory)
        pools = (f"{roles_of_pool(one)}  {ranks_of_pool(one)}" for one in candidate.placed.choices)
        bars = candidate.time.timeline.bars.values()
        drawn = ((names.index(pool), bar.task.name, bar.start, bar.stop) for bar in bars for pool in bar.task.pools)
        return cls(candidate.seconds, tuple(pools), tuple(drawn))


def draw_placements(mapped: SearchResult, output_png: Path) -> None:
    """Write the picture."""
    output_png.parent.mkdir(parents=True, exist_ok=True)
    draw_layouts([DrawnLayout.of(candidate) for candidate in mapped.candidates]).savefig(output_png)


def draw_layouts(shown: Sequence[DrawnLayout]) -> Figure:
    """Draw at least one layout: a panel for each, with a row for each of its pools."""
    phases = list(dict.fromkeys(phase for each in shown for _, phase, _, _ in each.bars))
    num_pools = [len(each.pools) for each in shown]
    figure = Figure(figsize=(11, 1.3 + 0.34 * sum(num_pools) + 0.2 * len(shown)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=num_pools)
    for number, (layout, axes) in enumerate(zip(shown, panels[:, 0], strict=True), start=1):
        _draw(axes, layout)
        axes.set_title(f"layout {number}: {layout.seconds:.2f} s", loc="left", fontsize=SMALL, color=INK)
    figure.suptitle("One step, fastest layout first; a row is a pool: roles, machines x ranks of each", **HEADING)
    panels[-1, 0].set_xlim(0, max(stop for each in shown for _, _, _, stop in each.bars))
    panels[-1, 0].set_xlabel("estimated seconds of one synchronous step", fontsize=SMALL, color=INK)
    patches = [Patch(color=phase_color(phase), label=phase) for phase in phases]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(8, len(phases)), fontsize=SMALL, frameon=False)
    return figure


def _draw(axes: Axes, layout: DrawnLayout) -> None:
    for pool, phase, start, stop in layout.bars:
        axes.barh(pool, stop - start, 0.7, left=start, color=phase_color(phase), linewidth=0)
    axes.set_yticks(range(len(layout.pools)), layout.pools, fontsize=SMALL)
    axes.set_ylim(len(layout.pools) - 0.5, -0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=SMALL, length=0)
    axes.grid(axis="x", color=FAINT, alpha=0.25)
    axes.set_axisbelow(True)
