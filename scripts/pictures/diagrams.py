"""The diagrams of the docs: the engine, processes, an episode. They show rules, and no numbers of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from megatron_rl.observe.picture_style import FAINT, INK, LABEL, WHITE, phase_color, text_color

SHARDS = ("#0b7a75", "#edae49", "#30638e", "#c97b63")
"""Colours of the four shards of a model, TP first: (pipeline stage 0, TP 0), (0, 1), (1, 0), (1, 1)."""
NUM_RANKS, TP_SIZE = 4, 2
RANK_ORDER = (0, 2, 1, 3)
"""From left to right: ranks that send shards to one another are neighbours."""
CELL = (0.66, 0.4)
"""Inches of a shard."""
LOOP = (
    ("reshard", ("reshard",), "missing shards only"),
    ("gen", ("gen",), "responses from vLLM"),
    ("reward", ("reward",), "functions, models"),
    ("log-probs, values", ("old_log_prob", "ref", "values"), "policy, reference, critic"),
    ("adv", ("adv",), "GAE, GRPO ..."),
    ("update", ("update_critic", "update_actor"), "Megatron"),
)
"""Boxes of the loop: text, the phases whose colours it has, and what happens."""


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty figure of so many inches whose only axes count in inches from its lower left corner."""
    figure = Figure(figsize=(width, height), facecolor=WHITE)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.set_axis_off()
    return figure, axes


def write(axes: Axes, x: float, y: float, text: str, size: float = 9.0, **style: Any) -> None:
    """Write text, centred at a point unless `style` says otherwise."""
    look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": size, "color": INK}
    axes.text(x, y, text, **look | style)


def box(axes: Axes, corner: tuple[float, float], size: tuple[float, float], **style: Any) -> None:
    """Draw a box with round corners. corner: the lower left one."""
    rounding = "round,pad=0,rounding_size=0.07"
    look: dict[str, Any] = {"facecolor": WHITE, "edgecolor": FAINT, "linewidth": 1.0} | style
    axes.add_patch(FancyBboxPatch(corner, *size, boxstyle=rounding, **look))


def arrow(axes: Axes, start: tuple[float, float], stop: tuple[float, float], color: str = INK, **style: Any) -> None:
    """Draw an arrow from point to point."""
    look: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 11, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch(start, stop, color=color, **look | style))


def training_shard(rank: int) -> int:
    """Return the shard that a rank trains, TP2 x PP2: consecutive ranks are one TP group."""
    return rank


def rollout_shards(rank: int) -> list[int]:
    """Return the shards that a rank generates with, TP2: its half of every layer."""
    return [shard for shard in range(NUM_RANKS) if shard % TP_SIZE == rank % TP_SIZE]


def missing(rank: int) -> list[tuple[int, int]]:
    """Return (shard, rank that sends it) of the shards that a rank generates with and does not train."""
    return [(shard, shard) for shard in rollout_shards(rank) if shard != training_shard(rank)]


def _model(axes: Axes, corner: tuple[float, float], filled: Sequence[int], rank: int) -> None:
    """Draw a model of 2 stages x 2 TP halves with the shards that a rank has. corner: the lower left one."""
    for shard in range(NUM_RANKS):
        stage, half = divmod(shard, TP_SIZE)
        place = (corner[0] + half * CELL[0], corner[1] + (1 - stage) * CELL[1])
        color = SHARDS[shard] if shard in filled else "#e8ecf0"
        axes.add_patch(Rectangle(place, *CELL, facecolor=color, edgecolor=WHITE, linewidth=1.5))
        if shard in filled:
            name = "own" if shard == training_shard(rank) else "received"
            write(axes, place[0] + CELL[0] / 2, place[1] + CELL[1] / 2, name, 7.2, color=text_color(color))


def engine() -> Figure:
    """Draw how four ranks go from TP2 x PP2 in training to TP2 in generation, and the loop of a step below."""
    figure, axes = canvas(11.0, 5.5)
    top, low = 4.0, 2.15
    for y, name, what in (
        (top, "Training", "Megatron-core\nTP2 x PP2"),
        (low, "Rollout", "vLLM in the same\nprocesses, 2 x TP2"),
    ):
        write(axes, 0.15, y + 0.6, name, 11, ha="left", weight="bold")
        write(axes, 0.15, y + 0.4, what, 8.5, ha="left", va="top", color=LABEL)
    lefts = {rank: 2.35 + place * 2.25 for place, rank in enumerate(RANK_ORDER)}
    for rank, left in lefts.items():
        stage, half = divmod(training_shard(rank), TP_SIZE)
        box(axes, (left - 0.3, low - 0.16), (2 * CELL[0] + 0.6, top - low + 1.52), facecolor="#fafbfc")
        write(axes, left + CELL[0], top + 1.14, f"rank {rank}", 9.5, weight="bold")
        write(axes, left + CELL[0], top + 0.92, f"pp_rank {stage}, tp_rank {half}", 7.5, color=LABEL)
        _model(axes, (left, top), [training_shard(rank)], rank)
        _model(axes, (left, low), rollout_shards(rank), rank)
        middle = left + (half + 0.5) * CELL[0]
        line = {"linestyle": (0, (2, 2)), "arrowstyle": "-", "linewidth": 1.3}
        start = top + (1 - stage) * CELL[1]
        arrow(axes, (middle, start), (middle, low + 2 * CELL[1]), SHARDS[training_shard(rank)], **line)
        write(axes, middle + 0.32, low + 3.2 * CELL[1], "same\nmemory", 7, color=LABEL)
    for rank, left in lefts.items():
        for shard, sender in missing(rank):
            _travel(axes, shard, lefts[sender], top, left, low)
    said = "Arrows: the only bytes that move. Each rank receives 1/4 of the model, the least possible."
    write(axes, 6.5, 1.72, said, 9)
    _loop(axes, 0.25)
    return figure


def _travel(axes: Axes, shard: int, start_left: float, start_bottom: float, left: float, bottom: float) -> None:
    """Draw a shard's way from a model to another one, from edge to edge of its cell. left, bottom: of the models."""
    stage, half = divmod(shard, TP_SIZE)
    height = (1.5 - stage) * CELL[1]
    to_right = left > start_left
    start = (start_left + (half + to_right) * CELL[0], start_bottom + height)
    stop = (left + (half + (not to_right)) * CELL[0], bottom + height)
    arrow(axes, start, stop, SHARDS[shard], linewidth=2.6, mutation_scale=17, zorder=5)


def _loop(axes: Axes, bottom: float) -> None:
    """Draw the phases of a step as boxes from left to right, and the way back."""
    write(axes, 0.15, bottom + 0.6, "A step", 11, ha="left", weight="bold")
    width, gap, height = 1.42, 0.2, 0.62
    for place, (name, phases, what) in enumerate(LOOP):
        x = 1.25 + place * (width + gap)
        box(axes, (x, bottom + 0.3), (width, height), facecolor="#fafbfc")
        for part, phase in enumerate(phases):
            stripe = (width - 0.16) / len(phases)
            corner = (x + 0.08 + part * stripe, bottom + 0.3 + height - 0.14)
            axes.add_patch(Rectangle(corner, stripe, 0.08, facecolor=phase_color(phase), linewidth=0, gid=phase))
        write(axes, x + width / 2, bottom + 0.62, name, 8.8, weight="bold")
        write(axes, x + width / 2, bottom + 0.42, what, 7.2, color=LABEL)
        if place + 1 < len(LOOP):
            arrow(axes, (x + width, bottom + 0.6), (x + width + gap, bottom + 0.6), mutation_scale=9)
    first, last = 1.25 + width / 2, 1.25 + (len(LOOP) - 1) * (width + gap) + width / 2
    line: dict[str, Any] = {"color": INK, "linewidth": 1.6, "solid_capstyle": "butt"}
    axes.plot([last, last, first], [bottom + 0.3, bottom + 0.1, bottom + 0.1], **line)
    arrow(axes, (first, bottom + 0.1), (first, bottom + 0.3))
