"""Compare a run with its plan: planned seconds of every step, warnings of phases that depart from them, and the limit
of a call without progress.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_rl.checkpoint.model_folder import ModelFolders
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.task_config import TaskConfig
from megatron_rl.planning.hardware import Hardware, planned_hardware
from megatron_rl.planning.memory import GEN, IMAGES, RESHARD
from megatron_rl.planning.memory_report import memory_report
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.step_time import step_load, step_time, task_load, task_time
from megatron_rl.planning.transition import TransitionPlan

WARM_UP = 1
"""Steps at the start that do not count: much is made and read for the first time in them."""
IN_A_ROW = 2
"""Consecutive steps in which a phase must depart: other work of the machine may delay a single one."""
LEAST_SHARE = 0.02
"""The share of a step from which a phase counts."""


class PlanDeviation:
    """Compares the planned and the measured seconds of every step.

    error: the share of its planned seconds by which a phase may differ from them.
    """

    def __init__(self, error: float) -> None:
        self._error = error
        self._num_steps = 0
        self._departed: dict[str, int] = {}
        self._warned: set[str] = set()

    def note(self, planned: Mapping[str, float], measured: Mapping[str, float]) -> list[str]:
        """Compare one step. Returns a sentence for each phase that departs and has not had one.

        A phase that was not measured does not count.
        """
        self._num_steps += 1
        if self._num_steps <= WARM_UP:
            return []
        step, warnings = sum(planned.values()), []
        for phase, seconds in planned.items():
            took = measured.get(phase)
            if took is None or max(took, seconds) < LEAST_SHARE * step:
                continue
            is_within = abs(took - seconds) <= self._error * seconds
            self._departed[phase] = 0 if is_within else self._departed.get(phase, 0) + 1
            if self._departed[phase] >= IN_A_ROW and phase not in self._warned:
                self._warned.add(phase)
                warnings.append(self._sentence(phase, seconds, took))
        return warnings

    def _sentence(self, phase: str, planned: float, took: float) -> str:
        times = f"{took / planned:.2f} times its plan" if planned else "and nothing was planned"
        return (
            f"{phase} departs from its plan: {planned:.3g} s planned, {took:.3g} s measured, {times}, where the "
            f"calibration's error is {self._error:.0%}"
        )


MEASURED, PLANNED = "timing_s/", "timing_planned_s/"
"""Prefixes of metric names: seconds of a phase, measured and planned."""
LENGTHS = ("prompt_length/mean", "response_length/mean")
SHORTEST_S = 1800.0
"""Least limit: starting engines and file access are not planned, and a slow file system can take this long."""
PHASES = 10.0
"""Methods report progress many times in a phase, so a machine that is merely slow does report within ten phases."""


class PlannedSteps:
    """Compares the steps of a run with its plan on profiled hardware."""

    def __init__(self, config: RunConfig, hardware: Hardware, folders: ModelFolders | None = None) -> None:
        """config: has passed preflight and has `kv_cache_memory_bytes`."""
        # Ranks measure their phases themselves, without the calls of the controller.
        self._config = config
        self._hardware = replace(hardware, overheads=replace(hardware.overheads, call=0.0))
        self._models = RunModels(config, folders)
        self._memory = memory_report(config, self._models, hardware)
        self._transition = TransitionPlan.of(self._models)
        self._departures = PlanDeviation(hardware.error)

    def seconds(self, prompt: float, response: float) -> dict[str, float]:
        """Return phase -> planned seconds at these mean tokens, slowed by phases of other pools that run meanwhile.

        Generation and resharding are left out where generation runs ahead: a step does not wait for all of them. Passes
        over images are, as the plan's number of images is assumed.
        """
        bound = self._config.data.max_response_length
        lengths = (max(1.0, prompt), min(max(1.0, response), bound))
        load = step_load(self._config, self._memory.tokens_of(lengths), lengths)
        time = step_time(self._models, self._hardware, load, self._transition)
        left = {IMAGES} | ({GEN, RESHARD} if self._config.samples_ahead else set())
        return {name: bar.stop - bar.start for name, bar in time.timeline.bars.items() if name not in left}

    def note(self, metrics: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
        """Take the metrics of a step; return the planned seconds of its phases as metrics, and sentences for the
        user.
        """
        planned = self.seconds(*(metrics[name] for name in LENGTHS))
        measured = {name.removeprefix(MEASURED): value for name, value in metrics.items() if name.startswith(MEASURED)}
        sentences = self._departures.note(planned, measured)
        return {f"{PLANNED}{phase}": seconds for phase, seconds in planned.items()}, sentences


def stall_timeout_s(config: RunConfig, folders: ModelFolders | None = None) -> float:
    """Return after how many seconds without progress a method of a rank counts as hung.

    That is `trainer.stall_timeout_s`, or where it is null ten times the longest planned phase, at least half an hour.
    """
    if config.trainer.stall_timeout_s is not None:
        return config.trainer.stall_timeout_s
    hardware, models = planned_hardware(config), RunModels(config, folders)
    if isinstance(config, TaskConfig):
        load = task_load(config, config.longest_sequence)
        return max(SHORTEST_S, PHASES * task_time(config, models, hardware, load).total)
    longest = (float(config.data.max_prompt_length), float(config.data.max_response_length))
    load = step_load(config, memory_report(config, models, hardware).tokens_of(longest), longest)
    seconds = step_time(models, hardware, load, TransitionPlan.of(models)).seconds
    return max(SHORTEST_S, PHASES * max(seconds.values()))
