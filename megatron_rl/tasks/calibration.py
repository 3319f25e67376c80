"""Calibration of a reward model: the share of pairs in the right order among those to which it gives probability p."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megatron_rl.losses.rankings import pairs_of
from megatron_rl.observe.appended_file import replace_file
from megatron_rl.observe.picture_style import FAINT, LABEL
from megatron_rl.observe.pictures import COLORS, TITLE, dress, new_figure, save_figure
from megatron_rl.records import Batch, num_answers
from megatron_rl.tasks.task_run import TaskRun

NUM_BINS = 10


@dataclass(frozen=True)
class Bin:
    """Pairs whose likelier order has a model probability between `low` and `high`.

    mean: mean of that probability. right: the share of pairs that are in this order.
    """

    low: float
    high: float
    pairs: int
    mean: float
    right: float


def calibration_bins(scores: torch.Tensor, sizes: torch.Tensor, num_bins: int = NUM_BINS) -> list[Bin]:
    """Sort pairs into bins of equal width from 1/2 to 1; empty bins are left out.

    scores float32 [N], the best of each prompt first; sizes int64 [n], responses of each prompt.
    """
    better, worse, _ = pairs_of(sizes)
    ahead = (scores[better] - scores[worse]).double()
    likely, is_right = torch.sigmoid(ahead.abs()), ahead > 0
    place = ((likely - 0.5) * 2 * num_bins).long().clamp(max=num_bins - 1)
    bins = []
    for number in range(num_bins):
        inside = place == number
        if inside.any():
            low, high = 0.5 + number / (2 * num_bins), 0.5 + (number + 1) / (2 * num_bins)
            mean, right = float(likely[inside].mean()), float(is_right[inside].double().mean())
            bins.append(Bin(low, high, int(inside.sum()), mean, right))
    return bins


def expected_error(bins: Sequence[Bin]) -> float:
    """Expected calibration error: the mean over pairs of |share in the right order - probability| of their bin."""
    return sum(each.pairs * abs(each.right - each.mean) for each in bins) / max(1, sum(each.pairs for each in bins))


def draw_calibration(run: TaskRun, batch: Batch, scores: Batch) -> None:
    """Write calibration.json and calibration.png of held-out pairs; warns if they cannot be written."""
    bins = calibration_bins(scores.flat("answer_scores"), num_answers(batch))
    if not bins:
        return
    folder = run.logger.folder.path
    try:
        content = {"expected_error": expected_error(bins), "bins": [asdict(each) for each in bins]}
        replace_file(folder / "calibration.json", json.dumps(content, indent=1).encode() + b"\n")
        plot(bins, folder / "calibration.png")
    except OSError as error:
        run.logger.warn(f"the calibration could not be written: {error}")


def plot(bins: Sequence[Bin], file: Path) -> None:
    """Plot probability against share for each bin, with the line on which they are equal."""
    figure = new_figure(5, 4)
    axes = figure.subplots()
    axes.plot([0.5, 1], [0.5, 1], color=FAINT, linewidth=1)
    most = max(each.pairs for each in bins)
    sizes = [20 + 180 * each.pairs / most for each in bins]
    axes.scatter([each.mean for each in bins], [each.right for each in bins], s=sizes, color=COLORS[0])
    axes.set_xlabel("probability of the likelier order, by the model", color=LABEL)
    axes.set_ylabel("share of pairs in that order", color=LABEL)
    axes.set_title(f"Held-out pairs, error {expected_error(bins):.3f}", **TITLE)
    dress(axes)
    save_figure(figure, file)
