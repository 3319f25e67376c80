"""Held-out examples of a task: their loss and metrics, and the step at which the loss was lowest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_rl.cluster.signals import StopRequest
from megatron_rl.config.schema import RunConfig
from megatron_rl.controller.run_logger import RunLogger
from megatron_rl.controller.validation import Validation

LOSS = "val/loss"

Measure = Callable[[], dict[str, float]]
"""Metrics of all held-out examples under the current weights, with `LOSS` among them."""


class ValidationLoss(Validation):
    """The validations of one run. losses: of all validations. best_step, best_loss: the lowest loss after a step.

    last, last_step: metrics of the newest validation, and the step it followed. `begin` comes before any validation.
    """

    measure: Measure

    def __init__(self, config: RunConfig, logger: RunLogger, stop: StopRequest) -> None:
        super().__init__(config, logger, stop)
        self.losses: list[float] = []
        self.best_step: int | None = None
        self.best_loss = float("inf")
        self.last: dict[str, float] = {}
        self.last_step: int | None = None

    def begin(self, measure: Measure, is_resumed: bool) -> None:
        """Set what a validation measures, and validate before training as `before_training` says."""
        self.measure = measure
        self.before_training(is_resumed)

    def run(self, step: int) -> dict[str, float]:
        """Validate now. The weights before training do not count for the best step."""
        with self.logger.clock.phase("testing"):
            self.last, self.last_step = self.measure(), step
        self.losses.append(self.last[LOSS])
        if step and self.last[LOSS] < self.best_loss:
            self.best_step, self.best_loss = step, self.last[LOSS]
        return self.last | self.logger.clock.take("testing")

    def step_to_keep(self) -> int | None:
        """The best step, if its checkpoint is to be kept."""
        return self.best_step if self.config.trainer.save_best else None

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        best = None if self.best_step is None else [self.best_step, self.best_loss]
        last = {"last": dict(self.last), "last_step": self.last_step}
        return {"held_out": {"losses": list(self.losses), "best": best, **last}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        held_out = state["held_out"]
        self.losses, self.last = list(held_out["losses"]), dict(held_out["last"])
        self.last_step = held_out.get("last_step")
        if held_out["best"] is not None:
            self.best_step, self.best_loss = held_out["best"]
