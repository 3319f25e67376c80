"""Picture of the placements: a timeline of one step each, one row per pool, on a common scale of seconds."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_rl.observe.curves import FAINT, INK
from megatron_rl.observe.phases import phase_color
from megatron_rl.planning.layout_search.finalists import Candidate
from megatron_rl.planning.layout_search.map_report import ranks_of_pool, roles_of_pool
from megatron_rl.planning.layout_search.mapped import Mapped

SMALL = 7.5
NEEDS_LATEX = "pgf"


def picture_suffixes() -> list[str]:
    """How the name of a picture may end, the usual ending first."""
    kinds = FigureCanvasAgg.get_supported_filetypes()
    return sorted((f".{kind}" for kind in kinds if kind != NEEDS_LATEX), key=lambda suffix: (suffix != ".png", suffix))


def draw_placements(mapped: Mapped, output_png: Path) -> None:
    """Write the picture."""
    shown = mapped.candidates
    phases = list(dict.fromkeys(phase for each in shown for phase in each.time.seconds))
    num_pools = [len(each.placed.choices) for each in shown]
    figure = Figure(figsize=(11, 1.0 + 0.34 * sum(num_pools) + 0.2 * len(shown)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=num_pools)
    for number, (candidate, axes) in enumerate(zip(shown, panels[:, 0], strict=True), start=1):
        _draw(axes, candidate)
        axes.set_title(f"{number}: {candidate.seconds:.2f} s", loc="left", fontsize=SMALL, color=INK)
    longest = max(each.time.total for each in shown)
    panels[-1, 0].set_xlim(0, longest)
    panels[-1, 0].set_xlabel("seconds of one step in turns, estimated", fontsize=SMALL, color=INK)
    patches = [Patch(color=phase_color(phase), label=phase) for phase in phases]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(8, len(phases)), fontsize=SMALL, frameon=False)
    output_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output_png)


def _draw(axes: Axes, candidate: Candidate) -> None:
    names = list(candidate.memory)
    for bar in candidate.time.timeline.bars.values():
        for pool in bar.task.pools:
            width = bar.stop - bar.start
            axes.barh(names.index(pool), width, 0.7, left=bar.start, color=phase_color(bar.task.name), linewidth=0)
    labels = [f"{roles_of_pool(one)}  {ranks_of_pool(one)}" for one in candidate.placed.choices]
    axes.set_yticks(range(len(names)), labels, fontsize=SMALL)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=SMALL, length=0)
    axes.grid(axis="x", color=FAINT, alpha=0.25)
    axes.set_axisbelow(True)
