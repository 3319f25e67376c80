"""What a reward model's score counts in training: normalised, then clipped, each model by itself.

    score --(s - mean) / std--> normalised --clip--> reward

mean and std are the model's own on held-out answers, which never change, or those of all training scores until now.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

SMALLEST_STD = 1e-8
"""What is divided by where all scores are equal, as in OpenRLHF."""


@dataclass
class RunningMoments:
    """Mean and spread of all scores that were added, in float64.

    squares: sum of squared deviations from the mean. Batches are merged as in Chan, Golub and LeVeque, "Updating
    Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979).
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, scores: Tensor) -> None:
        """float32 [n], finite."""
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
        """Of a sample (divided by n - 1); 1 where there are fewer than two scores."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 1.0


@dataclass(frozen=True)
class ModelShaping:
    """How one model's scores are shaped. path: the model's folder. fixed: (mean, std) of held-out scores.

    is_running: mean and std are those of training. Neither: scores are not normalised. clip: (lowest, highest), or
    None.
    """

    path: str
    fixed: tuple[float, float] | None = None
    is_running: bool = False
    clip: tuple[float, float] | None = None


@dataclass(frozen=True)
class Shaped:
    """float32 [n], and of each whether it was clipped, bool [n]; None where nothing is clipped."""

    rewards: Tensor
    is_clipped: Tensor | None = None


class RewardShaping:
    """The shapes of a run's reward models by name, and the running moments of those that have some."""

    def __init__(self, shapes: Mapping[str, ModelShaping] | None = None) -> None:
        self.shapes = dict(shapes or {})
        self._running = {name: RunningMoments() for name, shape in self.shapes.items() if shape.is_running}

    def __call__(self, name: str, scores: Tensor, counts: bool) -> Shaped | None:
        """What a model's scores [n], finite, are worth; None where they are taken as they are.

        counts: they join the running moments first, so that these are never empty.
        """
        shape = self.shapes.get(name)
        if shape is None:
            return None
        values = scores.double()
        running = self._running.get(name)
        if running is not None:
            if counts:
                running.add(scores)
            values = (values - running.mean) / max(running.std, SMALLEST_STD)
        elif shape.fixed is not None:
            mean, std = shape.fixed
            values = (values - mean) / std
        if shape.clip is None:
            return Shaped(values.float())
        inside = values.clamp(*shape.clip)
        return Shaped(inside.float(), inside != values)

    def metrics(self) -> dict[str, float]:
        """Running mean and spread of each model that has them."""
        found: dict[str, float] = {}
        for name, running in self._running.items():
            found |= {f"reward/{name}/running_mean": running.mean, f"reward/{name}/running_std": running.std}
        return found

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready, exact: JSON keeps every digit of a float64."""
        return {
            "reward_shaping": {
                name: {"path": self.shapes[name].path, **vars(running)} for name, running in self._running.items()
            }
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; a model that is another one now, or was not normalised, begins anew."""
        for name, saved in state.get("reward_shaping", {}).items():
            if name in self._running and saved["path"] == self.shapes[name].path:
                self._running[name] = RunningMoments(int(saved["count"]), float(saved["mean"]), float(saved["squares"]))
