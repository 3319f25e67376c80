"""Profile a machine: worlds of ranks one after the other, a short run, and the hardware that is fitted to them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.config.load import read_config
from megatron_rl.config.problems import raise_problems
from megatron_rl.errors import ConfigError, WorkerFailure
from megatron_rl.planning.hardware import Hardware
from megatron_rl.planning.planned_steps import PlannedSteps
from megatron_rl.planning.run_plan import RunPlan
from megatron_rl.planning.step_time import calls, step_load
from megatron_rl.planning.time import ModelCost
from megatron_rl.profile import probe as probes
from megatron_rl.profile.fit import Probe, base_hardware, errors, fit_collectives, fit_context, fit_overheads, quantile
from megatron_rl.profile.samples import Case, MeasuringTask, World
from megatron_rl.trials.trial import TimeLimits, Trial
from megatron_rl.trials.trial_outcome import TrialOutcome

if TYPE_CHECKING:
    from megatron_rl.profile.world_launch import Worlds


class DeviceKind(StrEnum):
    """Device of the ranks."""

    CPU = "cpu"
    CUDA = "cuda"


PASSES = (Case(4, 8, 4), Case(16, 8, 4), Case(16, 40, 24), Case(48, 8, 4))
CUT_PASSES = (Case(16, 8, 4), Case(32, 16, 8))
GENERATIONS = (Case(4, 8, 4), Case(4, 8, 24), Case(32, 8, 4), Case(32, 8, 24), Case(32, 40, 24))
CONTEXT_PASSES = (*CUT_PASSES, Case(16, 40, 24))
CONTEXT_RANKS = 2
CUT_GENERATIONS = (Case(8, 8, 8), Case(32, 8, 8))
LEAST_ERROR = 0.1
USUAL = 0.9
"""Share of the samples whose error is at most the `error` of the hardware file."""
WORLD_LIMIT_S, RUN_LIMIT_S = 240.0, 300.0
MOST_RANKS = 64
CPU_RANKS = 4
"""Default processes of a machine without GPUs, as in the demo."""
DRIVER = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class ProfileRequest:
    """Measurements to make. device: cpu or cuda. num_ranks: of a run on this machine. repeats: of every sample."""

    device: str
    num_ranks: int
    repeats: int = 5

    @property
    def tp_sizes(self) -> list[int]:
        """Powers of 2 that divide the ranks and the probe's heads."""
        heads = probes.HEADS[self.device]
        return [size for size in (2, 4, 8, 16) if self.num_ranks % size == 0 and heads % size == 0]


@dataclass(frozen=True)
class Measured:
    """The result of a profile.

    errors: relative, of the estimate of each sample. seconds: of the whole profile. start_up_s: of the short run.
    step, phases: of the short run, (planned, measured) seconds.
    """

    hardware: Hardware
    worlds: list[World]
    errors: list[float]
    seconds: float
    start_up_s: float | None = None
    step: tuple[float, float] | None = None
    phases: dict[str, tuple[float, float]] = field(default_factory=dict)


def number_of_gpus() -> int:
    """Count the GPUs of this machine as the driver lists them, without importing torch."""
    return len(list(DRIVER.iterdir())) if DRIVER.is_dir() else 0


def requested(device: str | None, num_ranks: int | None, num_gpus: int) -> ProfileRequest:
    """Check the options of `profile`. num_gpus: of this machine. None: the default. Raises ConfigError."""
    device = device or ("cuda" if num_gpus else "cpu")
    if device == "cuda" and not num_gpus:
        raise ConfigError("--device cuda needs a GPU, and this machine has none; try: --device cpu")
    most = min(num_gpus, MOST_RANKS) if device == "cuda" else MOST_RANKS
    num_ranks = (most if device == "cuda" else CPU_RANKS) if num_ranks is None else num_ranks
    if not 1 <= num_ranks <= most:
        nearest = min(max(1, num_ranks), most)
        raise ConfigError(f"--ranks {num_ranks} must be >= 1 and <= {most}; try: --ranks {nearest}")
    return ProfileRequest(device, num_ranks)


def profile(request: ProfileRequest, say: Callable[[str], None], short_run: bool = True) -> Measured:
    """Measure this machine, which takes minutes. Raises WorkerFailure where a rank or the run fails."""
    from megatron_rl.profile.world_launch import Worlds  # torch comes with it, which commands that plan do not need

    started = time.monotonic()
    with Worlds(request.device, request.num_ranks) as ranks:
        folder = ranks.folder
        say("making two small models")
        probes.save_data(folder)
        for layers in (probes.SHALLOW, probes.DEEP):
            probes.save_model(folder / f"model_{layers}", layers, request.device)
        worlds = [_measure(task, folder, ranks, say) for task in tasks(request, folder)]
        hardware, missed = _fitted(worlds, request, folder)
        measured = Measured(hardware, worlds, missed, 0.0)
        if short_run:
            say(f"a short run on {request.num_ranks} ranks")
            measured = _with_run(measured, request, folder)
    return replace(measured, seconds=time.monotonic() - started)


def tasks(request: ProfileRequest, folder: Path) -> list[MeasuringTask]:
    """Return the worlds to measure: one rank with each model, then all ranks at each TP size, and with CP 2."""
    device, repeats, alone = request.device, request.repeats, 1

    def task(layers: int, tp_size: int, world_size: int, **what: Any) -> MeasuringTask:
        return MeasuringTask(
            device, str(folder / f"model_{layers}"), layers, tp_size, world_size, repeats=repeats, **what
        )

    cases = {"passes": PASSES, "generations": GENERATIONS}
    worlds = [task(probes.SHALLOW, 1, alone, kernels=True, **cases), task(probes.DEEP, 1, alone, **cases)]
    cut = {"passes": CUT_PASSES, "generations": CUT_GENERATIONS}
    for number, tp_size in enumerate(request.tp_sizes):
        own = {"kernels": True, "alone": device == "cpu"} if number == 0 else {}
        worlds.append(task(probes.DEEP, tp_size, request.num_ranks, **own, **cut))
    if request.num_ranks > 1 and not request.tp_sizes:
        worlds.append(task(probes.DEEP, 1, request.num_ranks, kernels=True))
    if request.num_ranks % CONTEXT_RANKS == 0:
        worlds.append(task(probes.DEEP, 1, request.num_ranks, passes=CONTEXT_PASSES, cp_size=CONTEXT_RANKS))
    return worlds


def _measure(task: MeasuringTask, folder: Path, ranks: Worlds, say: Callable[[str], None]) -> World:
    sizes = f"TP{task.tp_size}" + f", CP{task.cp_size}" * (task.cp_size > 1)
    say(f"{task.world_size} rank{'s' * (task.world_size > 1)}, {sizes}, a model of {task.num_layers} layers")
    name = f"world_{task.world_size}_{task.tp_size}_{task.cp_size}_{task.num_layers}"
    content = probes.settings(folder, Path(task.model), task.device, task.world_size, probes.LONGEST_RESPONSE)
    content = probes.cut(content, task.tp_size, task.cp_size)
    config = probes.write_config(content, folder / f"{name}.yaml")
    return ranks.run(task, config, WORLD_LIMIT_S)


def _fitted(worlds: list[World], request: ProfileRequest, folder: Path) -> tuple[Hardware, list[float]]:
    dtype = probes.dtype_of(request.device)
    costs = {
        layers: ModelCost.of(ModelFolder(folder / f"model_{layers}").model) for layers in (probes.SHALLOW, probes.DEEP)
    }
    probes_of_worlds = [Probe(world, costs[world.task.num_layers], dtype, probes.MICRO_BATCH) for world in worlds]
    together = next((world for world in worlds if world.task.world_size > 1 and world.task.kernels), None)
    num_cores = psutil.cpu_count() or 1
    base = base_hardware(worlds[0], together, memory_of_rank(request), dtype, request.num_ranks, num_cores)
    known = replace(base, overheads=fit_overheads(base, probes_of_worlds[:2]))
    training, engine = fit_collectives(known, [each for each in probes_of_worlds if each.tp > 1])
    known = replace(known, collectives=training, engine_collectives=engine)
    known = replace(known, overheads=fit_context(known, [each for each in probes_of_worlds if each.cp > 1]))
    missed = errors(known, probes_of_worlds)
    return replace(known, error=max(LEAST_ERROR, quantile([abs(error) for error in missed], USUAL))), missed


def memory_of_rank(request: ProfileRequest) -> float:
    """Return the bytes of a GPU, or of a rank's share of this machine's memory."""
    if request.device == "cpu":
        return float(psutil.virtual_memory().total // request.num_ranks)
    import torch

    return float(torch.cuda.get_device_properties(0).total_memory)


def _with_run(measured: Measured, request: ProfileRequest, folder: Path) -> Measured:
    """Add what only a run shows: time of controller calls, of the resharding, and of start-up."""
    content = probes.settings(
        folder,
        folder / f"model_{probes.DEEP}",
        request.device,
        request.num_ranks,
        probes.RUN_RESPONSE,
    )
    config = probes.write_config(content, folder / "run.yaml")
    trial = Trial(config, folder / "run")
    trial.folder.mkdir()
    attempt = trial.run_once(TimeLimits(whole_s=RUN_LIMIT_S))
    if attempt.outcome is not TrialOutcome.FINISHED:
        raise WorkerFailure("\n".join([f"the short run failed: {attempt.reason}", *attempt.tail(12)]))
    steps = [metrics for step, metrics in trial.recorded().items() if step > probes.WARM_UP]
    start_up = attempt.seconds - sum(metrics["timing_s/step"] for metrics in trial.recorded().values())
    hardware, planned, whole = with_run(measured.hardware, steps, config)
    # Ranks measure their phases themselves, without controller calls.
    own = PlannedSteps(planned.config, hardware).seconds(*planned.lengths)
    phases = {
        phase: (seconds, statistics.median(metrics.get(f"timing_s/{phase}", 0.0) for metrics in steps))
        for phase, seconds in own.items()
    }
    return replace(measured, hardware=hardware, start_up_s=start_up, step=(planned.step_seconds, whole), phases=phases)


def with_run(hardware: Hardware, steps: Sequence[Mapping[str, float]], config: Path) -> tuple[Hardware, RunPlan, float]:
    """Fit resharding and controller calls to the steps of a run; return hardware, plan of the run, and median step.

    Time of a step outside of all phases is attributed to controller calls.
    """
    run_config, violations = read_config(str(config), ())
    raise_problems("the short run's configuration", violations)
    assert run_config is not None  # it has no violations
    lengths = tuple(statistics.median(metrics[f"{name}_length/mean"] for metrics in steps) for name in NAMES)
    bare = replace(hardware, overheads=replace(hardware.overheads, transition=0.0, call=0.0))
    plan = RunPlan.of(run_config, bare, (lengths[0], lengths[1]))
    step = statistics.median(metrics["timing_s/step"] for metrics in steps)
    known = [f"timing_s/{phase}" for phase in plan.seconds]
    rest = statistics.median(
        metrics["timing_s/step"] - sum(metrics.get(name, 0.0) for name in known) for metrics in steps
    )
    reshard = statistics.median(metrics.get("timing_s/reshard", 0.0) for metrics in steps)
    number = sum(calls(plan.models, step_load(run_config, plan.memory.tokens_of(plan.lengths), plan.lengths)).values())
    overheads = replace(
        hardware.overheads,
        transition=max(0.0, reshard - plan.seconds["reshard"]),
        call=max(0.0, rest) / number / plan.models.placement.world_size,
    )
    fitted = replace(hardware, overheads=overheads)
    return fitted, RunPlan.of(run_config, fitted, plan.lengths), step


NAMES = ("prompt", "response")


def kept_samples(measured: Measured) -> list[dict[str, Any]]:
    """Return every sample with its world, for people."""
    return [
        {"ranks": world.task.world_size, "tp": world.task.tp_size, "cp": world.task.cp_size}
        | {"layers": world.task.num_layers}
        | {name: value for name, value in asdict(sample).items() if value}
        for world in measured.worlds
        for sample in world.samples
    ]
