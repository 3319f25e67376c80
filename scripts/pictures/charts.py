"""The pictures of the docs that show numbers of runs and plans."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import show_stages
from demo_record import RECORD
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from pictures import records

from megatron_rl.observe.curves import draw_curves
from megatron_rl.observe.phase_clock import PhaseRun
from megatron_rl.observe.picture_style import INK, LABEL
from megatron_rl.observe.pictures import COLORS, TITLE, draw_timeline, dress
from megatron_rl.planning.layout_search.map_picture import DrawnLayout, draw_layouts
from megatron_rl.trials.ablation_picture import ablation_figure
from megatron_rl.trials.result import PHASES, REST, Result
from megatron_rl.trials.trial_outcome import TrialOutcome

REPORT = Path(__file__).parents[2] / "docs/internals/measured.md"
BASELINE = " (baseline)"
RECIPES = {
    "demo": "PPO",
    "grpo": "GRPO",
    "dr_grpo": "Dr.GRPO",
    "rloo": "RLOO",
    "opo": "OPO",
    "remax": "ReMax",
    "reinforce_pp": "REINFORCE++",
    "reinforce_pp_baseline": "REINFORCE++-baseline",
    "gspo": "GSPO",
    "dapo": "DAPO",
}
"""Run -> title of its panel, in the order of panels."""
COLUMNS = 5


def curves(steps: Sequence[Mapping[str, float]]) -> Figure:
    """Draw the panels of `curves.png`. steps: the metrics of each step."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "metrics.jsonl")
        file.write_text("".join(json.dumps(step) + "\n" for step in steps))
        return draw_curves(file)


def demo_curves() -> Figure:
    """Draw the demo's recorded run."""
    return curves(json.loads(RECORD.read_text())["metrics"])


def real_curves() -> Figure:
    """Draw the run of `make demo-real`."""
    return curves(records.read("real"))


def timeline(name: str) -> Figure:
    """Draw the calls of a run's last steps. name: of the record."""
    return draw_timeline([PhaseRun(*call) for call in records.read(name)])


def layouts() -> Figure:
    """Draw the ten fastest layouts that `megatron-rl map` found."""
    found = records.read("map")
    return draw_layouts([DrawnLayout(one["seconds"], tuple(one["pools"]), tuple(one["bars"])) for one in found])


def stages() -> Figure:
    """Draw PPO against a reward model: accuracy, score and KL."""
    metrics = {int(step): values for step, values in records.read("rlhf_stages").items()}
    return show_stages.draw(metrics, show_stages.validations(metrics))


def recipes() -> Figure:
    """Draw reward and held-out accuracy of each recipe of the demo, a panel for each."""
    runs = records.read("recipes")
    steps = json.loads(RECORD.read_text())["metrics"]
    runs["demo"] = {
        "reward": {step["step"]: step[records.REWARD] for step in steps if records.REWARD in step},
        "accuracy": {step["step"]: step[name] for step in steps for name in step if name.endswith(records.ACCURACY)},
    }
    num_rows = -(-len(RECIPES) // COLUMNS)
    figure = Figure(figsize=(13, 2.5 * num_rows + 0.5), dpi=120, layout="constrained")
    panels = figure.subplots(num_rows, COLUMNS, sharex=True, sharey=True, squeeze=False)
    for axes, (name, title) in zip(panels.flat, RECIPES.items(), strict=True):
        reward, accuracy = (
            {int(step): one for step, one in runs[name][what].items()} for what in ("reward", "accuracy")
        )
        axes.plot([*reward], [*reward.values()], color=LABEL, linewidth=1.1, label="mean reward of the step's samples")
        style = {"color": COLORS[0], "linewidth": 2, "marker": "o", "markersize": 4.5}
        axes.plot([*accuracy], [*accuracy.values()], label="held-out accuracy, greedy", **style)
        axes.set_title(f"{title}\n{accuracy[0]:.3f} to {accuracy[max(accuracy)]:.3f}", **TITLE | {"fontsize": 9.5})
        axes.set_ylim(0, 1.05)
        _dress(axes)
    for axes in panels[-1]:
        axes.set_xlabel("step", color=LABEL, fontsize=8.5)
    for axes in panels[:, 0]:
        axes.set_ylabel("reward, accuracy", color=LABEL, fontsize=8.5)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=2, frameon=False, fontsize=9, labelcolor=INK, loc="outside lower center")
    return figure


def distillation() -> Figure:
    """Draw the probability that teacher and student give to the teacher's top-k tokens, and the loss."""
    steps = {int(step): values for step, values in records.read("distillation").items()}
    figure = Figure(figsize=(9, 3.0), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, label, color in zip(records.MASSES, ("teacher", "student"), (LABEL, COLORS[0]), strict=True):
        left.plot([*steps], [values[name] for values in steps.values()], color=color, linewidth=2, label=label)
    left.set_title("Probability mass on the teacher's top 2 tokens", **TITLE)
    left.set_ylim(0.9, 1.0)
    left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    left.legend(frameon=False, labelcolor=INK, fontsize=8.5)
    right.plot([*steps], [values[records.LOSS] for values in steps.values()], color=COLORS[0], linewidth=2)
    right.set_title("Distillation loss per token (nats)", **TITLE)
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel("step", color=LABEL, fontsize=8.5)
        _dress(axes)
    return figure


def _dress(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
    dress(axes)
    axes.tick_params(length=0)


def ablation() -> Figure:
    """Draw the ablation whose table is in docs/internals/measured.md."""
    rows = ablation_rows(REPORT.read_text())
    baseline = next(row.name for row in rows if row.is_baseline)
    return ablation_figure(rows, baseline)


def ablation_rows(page: str) -> list[Any]:
    """Return the points of the first table of an ablation's report, with the fields that the picture reads."""
    table = page.partition("<!-- begin of scripts/ablation_page.py -->")[2]
    lines = [line for line in table.partition("\n\n- step s")[0].splitlines() if line.startswith("|")]
    names, *points = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line)
    return [_row(dict(zip(names, cells, strict=False)), cells) for cells in points]


def _row(cell: Mapping[str, str], cells: Sequence[str]) -> Any:
    """Return a point of its row. cells: the row's, as two columns are called x."""
    label = cell["layout"].replace("**", "").removesuffix(BASELINE)
    median, low, high = (float(number) for number in re.findall(r"[\d.]+", cell["step s"]))
    measured, planned = (1e6 * float(number) for number in cell["memory / planned MB"].split(" / "))
    received, bound = (round(1e6 * float(number)) for number in cell["received / least MB"].split(" / "))
    ranks = round(float(cell["tokens/s"]) / float(cell["per rank"]))
    phases = {name: float(cell[name]) for name in (*PHASES, REST)}
    result = Result(
        num_steps=1,
        num_ranks=ranks,
        step_s=(median, low, high),
        phases_s=phases,
        tokens_per_s=float(cell["tokens/s"]),
        received_bytes=received,
        bound_bytes=bound,
        exchange_s=float(cell["exchange ms"]) / 1000,
        memory_bytes=measured,
        planned_memory_bytes=planned,
        scores=(float(cell["reward"]),),
    )
    planned_point = SimpleNamespace(label=label)
    is_baseline = cells[0].endswith(BASELINE)
    return SimpleNamespace(
        name=label, planned=planned_point, outcome=TrialOutcome.FINISHED, result=result, is_baseline=is_baseline
    )
