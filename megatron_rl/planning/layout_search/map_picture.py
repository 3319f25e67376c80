"""Picture of the placements: a timeline of one step each, one row per pool, on a common scale of seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from megatron_rl.observe.picture_style import INK
from megatron_rl.observe.pictures import Bar, draw_bars, encoded, new_figure, phase_legend
from megatron_rl.planning.layout_search.exact_ranking import Candidate
from megatron_rl.planning.layout_search.map_report import ranks_of_pool, roles_of_pool
from megatron_rl.planning.layout_search.search_result import SearchResult

SMALL = 7.5
HEADING: dict[str, Any] = {"x": 0.01, "ha": "left", "fontsize": 10.5, "fontweight": "bold", "color": INK}
NEEDS_LATEX = "pgf"


def picture_suffixes() -> list[str]:
    """How the name of a picture may end, the usual ending first."""
    kinds = Figure().canvas.get_supported_filetypes()
    return sorted((f".{kind}" for kind in kinds if kind != NEEDS_LATEX), key=lambda suffix: (suffix != ".png", suffix))


@dataclass(frozen=True)
class DrawnLayout:
    """What the picture shows of one layout.

    seconds: of its step. pools: roles and ranks of each pool. bars: rows are indices of pools.
    """

    seconds: float
    pools: tuple[str, ...]
    bars: tuple[Bar, ...]

    @classmethod
    def of(cls, candidate: Candidate) -> DrawnLayout:
        """Return what is shown of a candidate."""
        names = list(candidate.memory)
        pools = (f"{roles_of_pool(one)}  {ranks_of_pool(one)}" for one in candidate.placed.choices)
        bars = candidate.time.timeline.bars.values()
        drawn = ((names.index(pool), bar.task.name, bar.start, bar.stop) for bar in bars for pool in bar.task.pools)
        return cls(candidate.seconds, tuple(pools), tuple(drawn))


def draw_placements(mapped: SearchResult, suffix: str) -> bytes:
    """Return the picture's file. suffix: the ending of its name, one of `picture_suffixes`."""
    return encoded(draw_layouts([DrawnLayout.of(candidate) for candidate in mapped.candidates]), suffix[1:].lower())


def draw_layouts(shown: Sequence[DrawnLayout]) -> Figure:
    """Draw at least one layout: a panel for each, with a row for each of its pools."""
    num_pools = [len(each.pools) for each in shown]
    figure = new_figure(11, 1.3 + 0.34 * sum(num_pools) + 0.2 * len(shown))
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=num_pools)
    end = max(stop for each in shown for _, _, _, stop in each.bars)
    for number, (layout, axes) in enumerate(zip(shown, panels[:, 0], strict=True), start=1):
        draw_bars(axes, layout.pools, layout.bars, end, SMALL)
        axes.set_title(f"layout {number}: {layout.seconds:.2f} s", loc="left", fontsize=SMALL, color=INK)
    title = "One step, fastest layout first; a row is a pool: roles, machines x ranks of each"
    figure.suptitle(title, **HEADING)
    panels[-1, 0].set_xlabel("estimated seconds of one synchronous step", fontsize=SMALL, color=INK)
    phase_legend(figure, list(dict.fromkeys(phase for each in shown for _, phase, _, _ in each.bars)))
    return figure
