"""How far a reward model's scores can be trusted: of pairs that it calls p likely, how many are in the right order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_rl.losses.rankings import pairs_of
from megatron_rl.records import AnswerBatch, AnswerScores
from megatron_rl.tasks.task_run import TaskRun

NUM_BINS = 10


@dataclass(frozen=True)
class Bin:
    """Pairs whose likelier order the model gives a probability between `low` and `high`.

    mean: of that probability. right: the share of pairs that are in this order.
    """

    low: float
    high: float
    pairs: int
    mean: float
    right: float


def calibration_bins(scores: torch.Tensor, sizes: torch.Tensor, num_bins: int = NUM_BINS) -> list[Bin]:
    """scores float32 [N], the best of each prompt first; sizes int64 [n]. Bins of equal width from 1/2 to 1; without
    those that have no pair."""
    better, worse, _ = pairs_of(sizes)
    ahead = (scores[better] - scores[worse]).double()
    likely, is_right = torch.sigmoid(ahead.abs()), ahead > 0
    place = ((likely - 0.5) * 2 * num_bins).long().clamp(max=num_bins - 1)
    found = []
    for number in range(num_bins):
        inside = place == number
        if inside.any():
            low, high = 0.5 + number / (2 * num_bins), 0.5 + (number + 1) / (2 * num_bins)
            mean, right = float(likely[inside].mean()), float(is_right[inside].double().mean())
            found.append(Bin(low, high, int(inside.sum()), mean, right))
    return found


def expected_error(bins: Sequence[Bin]) -> float:
    """The mean over pairs of |share in the right order - probability|, bin by bin."""
    return sum(one.pairs * abs(one.right - one.mean) for one in bins) / max(1, sum(one.pairs for one in bins))


def draw_calibration(run: TaskRun, batch: AnswerBatch, found: AnswerScores) -> None:
    """Write calibration.json and calibration.png of held-out pairs; warns where they cannot be written."""
    bins = calibration_bins(found.scores.values(), batch.sizes)
    if not bins:
        return
    folder = run.logger.folder.path
    try:
        content = {"expected_error": expected_error(bins), "bins": [asdict(one) for one in bins]}
        (folder / "calibration.json").write_text(json.dumps(content, indent=1) + "\n")
        plot(bins, folder / "calibration.png")
    except OSError as error:
        run.logger.warn(f"the calibration could not be written: {error}")


def plot(bins: Sequence[Bin], file: Path) -> None:
    """Probability and share of each bin, beside the line on which they are equal."""
    figure = Figure(figsize=(5, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([0.5, 1], [0.5, 1], color="#9aa5b1", linewidth=1)
    most = max(one.pairs for one in bins)
    sizes = [20 + 180 * one.pairs / most for one in bins]
    axes.scatter([one.mean for one in bins], [one.right for one in bins], s=sizes, color="#0b7a75")
    axes.set_xlabel("probability of the likelier order, by the model")
    axes.set_ylabel("share of pairs in that order")
    axes.set_title(f"Held-out pairs, error {expected_error(bins):.3f}", loc="left", fontsize=10.5)
    figure.savefig(file, dpi=130)
