"""What each step of a run is planned to take, with the lengths that its samples turned out to have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_rl.config.schema import RunConfig
from megatron_rl.ledger.planner.hardware import Hardware
from megatron_rl.ledger.planner.memory import GEN, RESHARD
from megatron_rl.ledger.planner.memory_report import memory_report
from megatron_rl.ledger.planner.run_models import RunModels
from megatron_rl.ledger.planner.step_time import step_load, step_time
from megatron_rl.ledger.planner.transition import TransitionPlan
from megatron_rl.observe.departures import Departures

MEASURED, PLANNED = "timing_s/", "timing_planned_s/"
"""How the metrics of a phase's seconds begin."""
LENGTHS = ("prompt_length/mean", "response_length/mean")


class PlannedSteps:
    """Holds a run to its plan on hardware that was profiled."""

    def __init__(self, config: RunConfig, hardware: Hardware) -> None:
        """config: that has passed preflight, with its KV cache."""
        # Phases are measured by the clocks of the ranks, which do not see the controller's calls.
        self._config = config
        self._hardware = replace(hardware, overheads=replace(hardware.overheads, call=0.0))
        self._models = RunModels(config)
        self._memory = memory_report(config, self._models, hardware)
        self._transition = TransitionPlan.of(self._models)
        self._departures = Departures(hardware.error)

    def seconds(self, prompt: float, response: float) -> dict[str, float]:
        """Phase -> planned seconds, at these mean tokens; phases of other pools beside it are counted in.

        Without those in which generation runs ahead: a step does not wait for all of it.
        """
        bound = self._config.data.max_response_length
        load = step_load(self._config, self._memory, (max(1.0, prompt), min(max(1.0, response), bound)))
        time = step_time(self._models, self._hardware, load, self._transition)
        ahead = {GEN, RESHARD} if self._config.samples_in_slices else set()
        return {name: bar.stop - bar.start for name, bar in time.timeline.bars.items() if name not in ahead}

    def note(self, metrics: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
        """A step's metrics -> (the planned seconds of its phases as metrics, what to tell the user)."""
        planned = self.seconds(*(metrics[name] for name in LENGTHS))
        measured = {name.removeprefix(MEASURED): value for name, value in metrics.items() if name.startswith(MEASURED)}
        said = self._departures.note(planned, measured)
        return {f"{PLANNED}{phase}": seconds for phase, seconds in planned.items()}, said
