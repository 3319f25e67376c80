"""The plan of a point before it runs: the rules that it breaks, or its layout and the planner's expectations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config.load import read_config, read_file
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation, shown
from megatron_rl.planning.checked_config import only_ppo
from megatron_rl.planning.hardware import planned_hardware
from megatron_rl.planning.preflight import preflight
from megatron_rl.planning.run_plan import RunPlan, mean_lengths
from megatron_rl.trials.ablation_file import AblationConfig
from megatron_rl.trials.points import LAYOUT, Point, points_of, round_name, short_names
from megatron_rl.trials.trial import Trial

LONGEST_OPTIONS = 100
"""Characters of options beyond which reports show the name of a point instead."""


@dataclass(frozen=True)
class GroupSizes:
    """The layout of a run: sizes of its groups. other_pools, other_ranks: pools other than the actor's."""

    tp: int
    pp: int
    dp: int
    rollout_tp: int
    cp: int = 1
    other_pools: int = 0
    other_ranks: int = 0

    @property
    def num_ranks(self) -> int:
        return self.tp * self.cp * self.pp * self.dp + self.other_ranks

    def __str__(self) -> str:
        cp = f"CP{self.cp} " if self.cp > 1 else ""
        pools = f", {1 + self.other_pools} pools" if self.other_pools else ""
        return f"TP{self.tp} {cp}PP{self.pp} DP{self.dp} \N{RIGHTWARDS ARROW} TP{self.rollout_tp}{pools}"


@dataclass(frozen=True)
class Expected:
    """The planner's numbers of one run, each of the worst rank.

    step_s: seconds of one step. peak_bytes: at the worst moment. received_bytes: in one resharding to rollout mode.
    """

    step_s: float
    peak_bytes: int
    received_bytes: int
    fits: bool


@dataclass(frozen=True)
class PlannedPoint:
    """A point with either violations, so that it is never started, or a layout and expectations.

    options: its own settings other than the layout, as text.
    """

    point: Point
    options: str
    violations: list[Violation]
    layout: GroupSizes | None = None
    expected: Expected | None = None

    @property
    def label(self) -> str:
        """Its name in reports."""
        if self.layout is None:
            return self.point.name
        options = self.options if len(self.options) <= LONGEST_OPTIONS else f"({self.point.name})"
        return f"{self.layout} {options}".rstrip()

    @property
    def reason(self) -> str:
        """All violations in one line."""
        return "; ".join(map(str, self.violations))


def trial_of(point: Point, ablation: AblationConfig, folder: Path, round_: int = 0) -> Trial:
    """The trial of a point in one round; it never resumes. folder: the ablation's."""
    fresh = ("trainer.resume_mode=disable", "trainer.resume_from_path=null")
    return Trial(Path(ablation.config), folder / "points" / round_name(point.name, round_), (*point.overrides, *fresh))


def plan_points(ablation: AblationConfig, folder: Path) -> list[PlannedPoint]:
    """The plan of every point, by the preflight and the planner of a single run. Raises ConfigError as `points_of`."""
    base = {setting.key: setting.value for setting in read_file(Path(ablation.config))}
    points = points_of(ablation, base)
    short = short_names({key for point in points for key in point.own})
    return [_planned(point, short, ablation, folder) for point in points]


def _planned(point: Point, short: dict[str, str], ablation: AblationConfig, folder: Path) -> PlannedPoint:
    others = {short[key]: value for key, value in point.own.items() if key not in LAYOUT}
    options = " ".join(f"{name}={shown(value)}" for name, value in others.items())
    config, violations = read_config(ablation.config, trial_of(point, ablation, folder).overrides)
    if config is not None:
        only_ppo(config, "ablate")
        violations = [*violations, *preflight(config), *_recording_problems(config, ablation)]
    if config is None or violations:
        return PlannedPoint(point, options, violations)
    hardware = planned_hardware(config, ablation.hardware)
    lengths = mean_lengths(config.data, ablation.prompt_length, ablation.response_length)
    plan = RunPlan.of(config, hardware, lengths)
    grid = plan.models.grid
    return PlannedPoint(
        point,
        options,
        [],
        GroupSizes(
            grid.tp_size,
            grid.pp_size,
            grid.dp_size,
            plan.models.rollout.tp_size,
            grid.cp_size,
            len(plan.models.pools) - 1,
            plan.models.placement.world_size - grid.world_size,
        ),
        Expected(
            plan.step_seconds,
            plan.memory.peak,
            max(map(sum, zip(plan.transition.network, plan.transition.link, strict=True))),
            plan.memory.fits,
        ),
    )


def _recording_problems(config: RunConfig, ablation: AblationConfig) -> Sequence[Violation]:
    """Violations of rules for runs whose records are read afterwards."""
    violations = []
    steps, logger = config.trainer.total_training_steps, list(config.trainer.logger)
    if steps is not None and steps <= ablation.warmup_steps:
        rule = f"must be more than the ablation's warmup_steps={ablation.warmup_steps}, which do not count"
        key = "trainer.total_training_steps"
        violations.append(Violation({key: steps}, rule, {key: ablation.warmup_steps + 1}))
    if "jsonl" not in logger:
        rule = "must have jsonl, which the ablation reads"
        violations.append(Violation({"trainer.logger": logger}, rule, {"trainer.logger": [*logger, "jsonl"]}))
    return violations
