"""Change scores for training: normalise and clip the scores of reward models, penalise responses that are too long.

    score --(s - mean) / std--> normalised --clip--> reward

Each reward model is normalised by itself. mean and std are fixed, from held-out responses, or run over all training
scores so far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

SMALLEST_STD = 1e-8
"""The divisor where all scores are equal, as in OpenRLHF."""
ROUNDING = 2.0**-20
"""A standard deviation below this share of the mean is the rounding of float32 scores, and no divisor either."""


@dataclass
class RunningMoments:
    """Mean and spread of all added scores, in float64.

    squares: sum of squared deviations from the mean. Batches are merged as in Chan, Golub and LeVeque, "Updating
    Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979).
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, scores: Tensor) -> None:
        """Add scores, float32 [n], finite."""
        if not len(scores):
            return
        values = scores.double()
        number, mean = len(values), float(values.mean())
        squares, total = float((values - mean).square().sum()), self.count + number
        ahead = mean - self.mean
        self.squares += squares + ahead * ahead * self.count * number / total
        self.mean += ahead * number / total
        self.count = total

    @property
    def std(self) -> float:
        """The sample's standard deviation (divided by n - 1); 1 where there are fewer than two scores."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 1.0


@dataclass(frozen=True)
class ModelShaping:
    """How one model's scores are shaped. path: the model's folder. fixed: (mean, std) of held-out scores.

    is_running: normalise by mean and std of training. Without `fixed` and `is_running` scores are not normalised.
    clip: (lowest, highest), or None.
    """

    path: str
    fixed: tuple[float, float] | None = None
    is_running: bool = False
    clip: tuple[float, float] | None = None


@dataclass(frozen=True)
class Shaped:
    """Shaped scores, float32 [n]. is_clipped: bool [n]; None for a model whose scores are never clipped."""

    rewards: Tensor
    is_clipped: Tensor | None = None


class RewardShaping:
    """Shapes the scores of a run's reward models, by name, and keeps their running moments."""

    def __init__(self, shapes: Mapping[str, ModelShaping] | None = None) -> None:
        self.shapes = dict(shapes or {})
        self._running = {name: RunningMoments() for name, shape in self.shapes.items() if shape.is_running}

    def __call__(self, name: str, scores: Tensor, counted: Tensor) -> Shaped | None:
        """Shape a model's scores [n], finite; None if the model's scores are not shaped.

        counted: float32 [m], those of them that are first added to the running moments.
        """
        shape = self.shapes.get(name)
        if shape is None:
            return None
        values = scores.double()
        running = self._running.get(name)
        if running is not None:
            running.add(counted)
            values = (values - running.mean) / max(running.std, SMALLEST_STD, ROUNDING * abs(running.mean))
        elif shape.fixed is not None:
            mean, std = shape.fixed
            values = (values - mean) / std
        if shape.clip is None:
            return Shaped(values.float())
        inside = values.clamp(*shape.clip)
        return Shaped(inside.float(), inside != values)

    def metrics(self) -> dict[str, float]:
        """Return the running mean and spread of each model that has them."""
        metrics: dict[str, float] = {}
        for name, running in self._running.items():
            metrics |= {f"reward/{name}/running_mean": running.mean, f"reward/{name}/running_std": running.std}
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the running moments, ready for JSON, which keeps every digit of a float64."""
        return {
            "reward_shaping": {
                name: {"path": self.shapes[name].path, **vars(running)} for name, running in self._running.items()
            }
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the running moments; a model at another path, or without saved moments, starts with empty ones."""
        for name, saved in state.get("reward_shaping", {}).items():
            if name in self._running and saved["path"] == self.shapes[name].path:
                self._running[name] = RunningMoments(int(saved["count"]), float(saved["mean"]), float(saved["squares"]))


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """float32 [B], <= 0, to add to the scores of responses of `lengths` int64 [B] tokens, at most `max_length`.

    0 up to max_length - buffer, then falling linearly to -factor at max_length (DAPO: Yu et al., arXiv:2503.14476,
    eq. 13). buffer >= 1.
    """
    excess = (lengths - (max_length - buffer)).clamp(min=0)
    return -factor * excess.float() / buffer
