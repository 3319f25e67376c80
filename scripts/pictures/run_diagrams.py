"""Two diagrams of what happens while a run is at work: its processes and pools, and the tokens of an episode."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from pictures.diagrams import arrow, box, canvas, write

from megatron_rl.observe.picture_style import FAINT, LABEL, WHITE, phase_color, text_color

PANE = "#fafbfc"
POOLS = (
    ("global_pool: TP2 x PP2", 4, (("actor", "update_actor"), ("reference", "ref"))),
    ("critic: DP2", 2, (("critic", "update_critic"),)),
    ("rollout: 2 x TP1", 2, (("vLLM engine", "gen"),)),
)
"""Pools of the picture: name and layout, ranks, and the roles of a rank with the phases whose colours they have."""
POLICY, TOOLS, PROMPT = "gen", "turns", "#c3cad3"
EPISODE = (
    ("system and user messages", PROMPT, 2.0, False),
    ("turn 1: calls a tool", POLICY, 1.9, True),
    ("tool result", TOOLS, 1.25, False),
    ("turn 2: answers", POLICY, 1.9, True),
    ("observation", TOOLS, 1.15, False),
    ("turn 3", POLICY, 1.1, True),
)
"""Parts of an episode: text, phase or colour, inches, and whether the policy sampled its tokens."""


def processes() -> Figure:
    """Draw the controller, three pools of ranks with their roles, and what passes between them."""
    figure, axes = canvas(11.4, 4.5)
    box(axes, (0.2, 2.35), (2.35, 1.95), facecolor=PANE)
    write(axes, 1.375, 4.02, "controller (driver)", 10, weight="bold")
    said = "train.py: the algorithm\nbatches, advantages, schedule\nno weights, no GPU"
    write(axes, 1.375, 3.3, said, 8.2, color=LABEL, linespacing=1.5)
    box(axes, (0.2, 0.75), (2.35, 1.1), facecolor=PANE)
    write(axes, 1.375, 1.6, "processes of user code", 9, weight="bold")
    write(axes, 1.375, 1.18, "reward functions, tools,\nenvironments", 8.2, color=LABEL)
    arrow(axes, (1.375, 2.35), (1.375, 1.85), arrowstyle="<|-|>")
    left, edges = 3.5, []
    for name, num_ranks, roles in POOLS:
        width = 0.32 + 0.79 * num_ranks
        _pool(axes, left, width, name, num_ranks, roles)
        edges.append((left, left + width))
        left += width + 0.22
    arrow(axes, (2.55, 3.2), (3.5, 3.2), arrowstyle="<|-|>")
    write(axes, 3.03, 3.62, "calls: one\nmessage per\nDP rank", 7.6, color=LABEL)
    start, stop = sum(edges[0]) / 2, sum(edges[2]) / 2
    color = phase_color("reshard")
    axes.plot([start, start, stop], [1.3, 0.98, 0.98], color=color, linewidth=2.4)
    arrow(axes, (stop, 0.98), (stop, 1.3), color, linewidth=2.4, mutation_scale=15)
    write(axes, (start + stop) / 2, 0.76, "weight transfer, if the rollout has a pool of its own", 8.4)
    said = "Ray, or the local launcher, starts one process per rank: one rank is one GPU, or one CPU process."
    write(axes, 5.7, 0.35, said, 9)
    return figure


def _pool(axes: Axes, left: float, width: float, name: str, num_ranks: int, roles: tuple) -> None:
    """Draw a pool as a frame with a box for each rank, and in it one for each role."""
    bottom, height = 1.3, 3.0
    box(axes, (left, bottom), (width, height), facecolor=PANE)
    write(axes, left + width / 2, bottom + height - 0.24, name, 8.8, weight="bold")
    for rank in range(num_ranks):
        x = left + 0.2 + rank * 0.79
        box(axes, (x, bottom + 0.52), (0.71, 1.95), facecolor=WHITE)
        write(axes, x + 0.355, bottom + 2.3, f"rank {rank}", 7.6)
        for place, (role, phase) in enumerate(roles):
            color = phase_color(phase)
            corner = (x + 0.06, bottom + 1.35 - 0.74 * (place + (2 - len(roles)) / 2))
            axes.add_patch(Rectangle(corner, 0.59, 0.68, facecolor=color, linewidth=0, gid=phase))
            text = role.replace(" ", "\n")
            write(axes, x + 0.355, corner[1] + 0.34, text, 7.0, color=text_color(color))
    write(axes, left + width / 2, bottom + 0.25, "groups: NCCL or gloo", 7.4, color=LABEL)


def episode() -> Figure:
    """Draw the tokens of an episode of three turns, which of them are trained, and where rewards come from."""
    figure, axes = canvas(11.0, 3.7)
    left, height = 1.45, 0.5
    rows = {"tokens": 2.35, "loss mask": 1.5, "reward": 0.72}
    for name, y in rows.items():
        write(axes, 0.2, y + height / 2, name, 9.5, ha="left", weight="bold")
    x = left
    for text, kind, width, is_sampled in EPISODE:
        color = kind if kind.startswith("#") else phase_color(kind)
        gid = None if kind.startswith("#") else kind
        part = Rectangle((x, rows["tokens"]), width, height, facecolor=color, edgecolor=WHITE, linewidth=1.5, gid=gid)
        axes.add_patch(part)
        write(axes, x + width / 2, rows["tokens"] + height / 2, text, 8, color=text_color(color))
        shade = "#d5ebe9" if is_sampled else "#eef1f4"
        axes.add_patch(
            Rectangle((x, rows["loss mask"]), width, height, facecolor=shade, edgecolor=WHITE, linewidth=1.5)
        )
        write(axes, x + width / 2, rows["loss mask"] + height / 2, "1" if is_sampled else "0", 9)
        if is_sampled:
            last = x + width - 0.08
            arrow(axes, (last, rows["reward"] + height - 0.05), (last, rows["loss mask"]), FAINT, linewidth=1.2)
            write(axes, last, rows["reward"] + height / 2, "r", 9, weight="bold")
        x += width
    write(axes, left, 3.3, "prompt", 8.6, ha="left", color=LABEL)
    write(axes, left + 2.0, 3.3, "green: sampled by the policy (vLLM); light green: written by environment, tool or "
          "agent", 8.6, ha="left", color=LABEL)  # fmt: skip
    said = "Tokens are only appended. Only sampled tokens are trained. The episode's score is the sum of its rewards."
    write(axes, 5.5, 0.32, said, 9)
    return figure
