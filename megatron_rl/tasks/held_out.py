"""Held-out examples: their loss and metrics, and the step at which the loss was lowest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_rl.cluster.signals import StopRequest
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.steps import is_validation_step
from megatron_rl.controller.run_logger import RunLogger

LOSS = "val/loss"

Measure = Callable[[], dict[str, float]]
"""Metrics of all held-out examples under the current weights, with `LOSS` among them."""


class HeldOut:
    """One run's validations. losses: of every one until now. best_step, best_loss: of the lowest after a step. last,
    last_step: metrics of the newest, and the step that it came after."""

    def __init__(self, config: RunConfig, logger: RunLogger, stop: StopRequest) -> None:
        self.config, self.logger, self._stop = config, logger, stop
        self.losses: list[float] = []
        self.best_step: int | None = None
        self.best_loss = float("inf")
        self.last: dict[str, float] = {}
        self.last_step: int | None = None

    def before_training(self, measure: Measure, is_resumed: bool) -> None:
        """Validate where that is configured and the run begins, or where a signal kept its life before from it."""
        if self.config.trainer.val_before_train and not is_resumed:
            self.logger.log(self._measured(measure, 0), step=0)
        self.logger.make_up(lambda step: self._compared(measure, step))

    def after(self, step: int, measure: Measure) -> dict[str, float]:
        """Validate where that is due after `step`; where the run is to stop, its next life does."""
        if not is_validation_step(self.config.trainer, step):
            return {}
        if self._stop.is_set:
            self.logger.skip_validation(step)
            return {}
        return self._compared(measure, step)

    def _compared(self, measure: Measure, step: int) -> dict[str, float]:
        metrics = self._measured(measure, step)
        if metrics[LOSS] < self.best_loss:
            self.best_step, self.best_loss = step, metrics[LOSS]
        return metrics

    def step_to_keep(self) -> int | None:
        """The best step, where its checkpoint is to be kept."""
        return self.best_step if self.config.trainer.save_best else None

    def _measured(self, measure: Measure, step: int) -> dict[str, float]:
        with self.logger.clock.phase("testing"):
            self.last, self.last_step = measure(), step
        self.losses.append(self.last[LOSS])
        return self.last | self.logger.clock.take("testing")

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        best = None if self.best_step is None else [self.best_step, self.best_loss]
        last = {"last": dict(self.last), "last_step": self.last_step}
        return {"held_out": {"losses": list(self.losses), "best": best, **last}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        held_out = state["held_out"]
        self.losses, self.last = list(held_out["losses"]), dict(held_out["last"])
        self.last_step = held_out.get("last_step")
        if held_out["best"] is not None:
            self.best_step, self.best_loss = held_out["best"]
