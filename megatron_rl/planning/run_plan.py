"""The plan of a run, which `megatron-rl plan` prints: a list of sections. Tasks differ by which sections they have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.table import Table

from megatron_rl.checkpoint.model_folder import ModelFolders
from megatron_rl.config.roles import Placement
from megatron_rl.config.schema import DataConfig, RunConfig
from megatron_rl.config.task_config import TaskConfig
from megatron_rl.observe.summary import layout_table
from megatron_rl.planning.async_estimate import AsyncEstimate, ahead_plan
from megatron_rl.planning.batch_arithmetic import group_notes, repeat_notes
from megatron_rl.planning.file_rules import train_rows
from megatron_rl.planning.fitting_changes import FittingChanges, misfit_notes
from megatron_rl.planning.folder_files import end_token_notes, lacking_in
from megatron_rl.planning.hardware import Hardware
from megatron_rl.planning.lora_rules import lora_notes
from megatron_rl.planning.memory import plan_pools
from megatron_rl.planning.memory_report import (
    GenerationMemory,
    LongestSequence,
    MemoryReport,
    longest_sequence,
    memory_report,
)
from megatron_rl.planning.plan_sections import (
    Row,
    Section,
    async_section,
    base_notes,
    batch_section,
    cache_section,
    delta_notes,
    elastic_notes,
    expert_notes,
    follower_section,
    image_section,
    memory_section,
    pool_section,
    transfer_section,
    turn_notes,
)
from megatron_rl.planning.preset_section import preset_section
from megatron_rl.planning.repair_copies import repair_notes
from megatron_rl.planning.replay_rules import replay_notes
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.step_time import StepTime, generation, step_load, step_time, task_load, task_time
from megatron_rl.planning.transition import TransitionPlan

SCREEN = ("memory", "time", "pools", "batch", "images", "followers", "cache", "transfer", "preset")
"""Sections in the order in which they are asked about."""
JSON_KEYS = (
    *("stage", "batch", "pools", "groups", "memory", "transition", "time", "lacking_files", "ahead", "followers"),
    *("preset", "images"),
)
LARGEST = 3
"""Phases of a step that the screen names."""
MINUTE, HOUR = 60.0, 3600.0


@dataclass(frozen=True)
class Plan(ABC):
    """The plan of a task.

    fitting: what would make it fit; None where it does. num_tokens: of one step. lengths: assumed mean tokens of
    prompt and response, or of a sequence.
    """

    config: RunConfig
    models: RunModels
    memory: MemoryReport
    fitting: FittingChanges | None
    time: StepTime
    num_tokens: float
    lengths: tuple[float, ...]

    @property
    def step_seconds(self) -> float:
        """Seconds of one step, in which the phases of different pools overlap."""
        return self.time.total

    @property
    def seconds(self) -> dict[str, float]:
        """Phase -> seconds in one step."""
        return self.time.seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens of prompts and responses per second, per rank of all pools."""
        return self.num_tokens / self.step_seconds / self.models.placement.world_size

    @cached_property
    @abstractmethod
    def sections(self) -> dict[str, Section]:
        """Name -> section, in the order of tables and notes."""

    def rows(self) -> list[Row]:
        """Return rows (name, value, meaning) of what is asked first."""
        return [row for name in SCREEN if name in self.sections for row in self.sections[name].rows]

    def tables(self) -> list[Table]:
        """Return all tables, in the order of printing."""
        return [table for section in self.sections.values() for table in section.tables]

    def notes(self) -> list[str]:
        """Return sentences to print after the tables."""
        return [note for section in self.sections.values() for note in section.notes]

    def as_json(self) -> dict[str, Any]:
        """Return bytes, seconds and ranks."""
        content: dict[str, Any] = {}
        for section in self.sections.values():
            for key, value in section.json.items():
                content[key] = content[key] | value if key in content else value
        return {key: content[key] for key in JSON_KEYS if key in content}

    def _time_section(self) -> Section:
        """Return the seconds of one step; of an evaluation, which has none, as data alone."""
        time, trainer, rate = self.time, self.config.trainer, f"{self.tokens_per_second:.0f}"
        slowest = sorted(time.seconds.items(), key=lambda item: -item[1])[:LARGEST]
        shares = ", ".join(f"{phase} {spent:.2f} s" for phase, spent in slowest)
        rows: list[Row] = [("one step", f"{time.total:.2f} s", f"estimated; {shares}")]
        if steps := trainer.total_training_steps:
            rows.append(("all steps", duration(time.total * steps), f"{steps} steps, without validation"))
        prompt, *response = self.lengths
        note = f"on each rank, at {prompt:g} a sequence"
        if response:
            options = "(--prompt-length, --response-length)"
            note = f"on each rank; {prompt:g} a prompt, {response[0]:g} a response {options}"
        rows.append(("tokens", f"{rate}/s", note))
        lengths = {"mean_length": prompt}
        decided: dict[str, Any] = {}
        if response:
            lengths = {"mean_prompt_length": prompt, "mean_response_length": response[0]}
            decided = {"pools": {phase: list(pools) for phase, pools in time.pools.items()}}
            decided |= {"critical_path": time.critical_path}
        json = {"seconds": time.seconds} | decided | {"step_seconds": time.total}
        json |= {"tokens_per_second_per_rank": self.tokens_per_second} | lengths
        at = " + ".join(f"{length:g}" for length in self.lengths) + f" tokens a {'sample' if response else 'sequence'}"
        table = layout_table(
            [*self._phase_rows(), ("step", f"{time.total:.2f} s", f"{rate} tokens/s per rank, at {at}")],
            f"One step on {self.memory.hardware.name}, estimated",
        )
        return Section(json={"time": json}) if trainer.val_only else Section(rows, [table], {"time": json})

    def _phase_rows(self) -> list[Row]:
        """Return all phases; with several pools also where each runs, and which phases decide."""
        time, path, rows = self.time, self.time.critical_path, list[Row]()
        for phase, seconds in time.seconds.items():
            note = f"{seconds / time.total:.0%}"
            if len(self.models.pools) > 1:
                note = f"{note if phase in path else 'beside others'}, on {' and '.join(time.pools[phase])}"
            rows.append((phase, f"{seconds:.2f} s", note))
        if len(self.models.pools) > 1:
            rows.append(("critical path", f"{time.total:.2f} s", " + ".join(path)))
        return rows

    def _model_notes(self) -> list[str]:
        folder = self.models.folders[Placement.of(self.config).leader.model_path]
        return end_token_notes(folder) + lora_notes(self.config)

    def _misfit_notes(self) -> list[str]:
        return [] if self.fitting is None else misfit_notes(self.memory, self.fitting)


@dataclass(frozen=True)
class RunPlan(Plan):
    """The plan of PPO.

    lacking: files that the actor's model folder must still get. train_rows: rows of each training file, up to one
    batch. ahead: None where generation does not run ahead of training.
    """

    memory: GenerationMemory
    lengths: tuple[float, float]
    transition: TransitionPlan
    lacking: list[str]
    train_rows: list[int]
    ahead: AsyncEstimate | None

    @classmethod
    def of(
        cls,
        config: RunConfig,
        hardware: Hardware,
        lengths: tuple[float, float] | None = None,
        folders: ModelFolders | None = None,
        variant_of: RunModels | None = None,
    ) -> RunPlan:
        """Plan a configuration that has passed preflight. lengths: mean tokens of prompt and response; None: half of
        the limits. folders, variant_of: as of `RunModels`.
        """
        lengths = lengths or mean_lengths(config.data)
        models = RunModels(config, folders, variant_of)
        memory = memory_report(config, models, hardware)
        transition = TransitionPlan.of(models)
        load = step_load(config, memory.tokens_of(lengths), lengths)
        time = step_time(models, hardware, load, transition)
        return cls(
            config=config,
            models=models,
            memory=memory,
            fitting=None if memory.fits else FittingChanges.of(config, models, hardware),
            time=time,
            num_tokens=load.num_tokens,
            lengths=lengths,
            transition=transition,
            lacking=lacking_in(models.folders[config.actor_rollout_ref.model.path].path),
            train_rows=train_rows(config.data),
            ahead=ahead_plan(config, models, generation(models, hardware), load, time),
        )

    @cached_property
    def longest(self) -> LongestSequence:
        """The longest sequence that this layout has room for."""
        return longest_sequence(self.config, self.models, self.memory)

    @cached_property
    def sections(self) -> dict[str, Section]:
        """Name -> section."""
        config, models, path = self.config, self.models, self.config.actor_rollout_ref.model.path
        files = [f"{path} {rule} before the run can start" for rule in self.lacking]
        kept = repair_notes(config, models.pools) + base_notes(models) + elastic_notes(config) + delta_notes(models)
        kept += expert_notes(models)
        return {
            "files": Section(json={"lacking_files": self.lacking}, notes=files),
            "batch": batch_section(config, repeat_notes(config.data, self.train_rows) + group_notes(config)),
            "preset": preset_section(config),
            "model": Section(notes=self._model_notes()),
            "pools": pool_section(models),
            "kept": Section(notes=kept + replay_notes(config, models.actor.shape)),
            "memory": memory_section(self.memory, self.fitting),
            "images": image_section(
                models.images(self.lengths[0]), models.grid.dp_size, is_trained=models.actor_role.trains_tower
            ),
            "cache": cache_section(self.memory, self.longest),
            "time": self._time_section(),
            **({} if self.ahead is None else {"ahead": async_section(self.ahead)}),
            "transfer": transfer_section(self.transition, config.trainer),
            "followers": follower_section(models),
            "limits": Section(notes=turn_notes(config) + self._misfit_notes()),
        }


@dataclass(frozen=True)
class TaskPlan(Plan):
    """The plan of a task that does not generate: sft, reward, dpo."""

    @classmethod
    def of(
        cls, config: TaskConfig, hardware: Hardware, length: float | None = None, folders: ModelFolders | None = None
    ) -> TaskPlan:
        """Plan a configuration that has passed preflight. length: None: half of the longest sequence."""
        mean = length or config.longest_sequence / 2
        models, load = RunModels(config, folders), task_load(config, mean)
        memory, time = MemoryReport(hardware, plan_pools(models)), task_time(config, models, hardware, load)
        fitting = None if memory.fits else FittingChanges.of(config, models, hardware)
        return cls(config, models, memory, fitting, time, load.num_tokens, (mean,))

    @cached_property
    def sections(self) -> dict[str, Section]:
        """Name -> section."""
        return {
            "batch": batch_section(self.config),
            "preset": preset_section(self.config),
            "model": Section(notes=self._model_notes()),
            "pools": pool_section(self.models),
            "memory": memory_section(self.memory, self.fitting),
            "time": self._time_section(),
            "followers": follower_section(self.models),
            "limits": Section(notes=self._misfit_notes()),
        }


def mean_lengths(data: DataConfig, prompt: float | None = None, response: float | None = None) -> tuple[float, float]:
    """Return mean tokens of prompt and response to plan with: as given, else half of the limit.

    A response does not exceed `data.max_response_length`.
    """
    return (
        prompt or data.max_prompt_length / 2,
        min(response or data.max_response_length / 2, data.max_response_length),
    )


def plan_of(
    config: RunConfig,
    hardware: Hardware,
    prompt: float | None = None,
    response: float | None = None,
    folders: ModelFolders | None = None,
    variant_of: RunModels | None = None,
) -> Plan:
    """Plan a configuration of any task. prompt, response: mean tokens; None: half of the limit. variant_of: as of
    `RunModels`, for a run that generates.
    """
    if isinstance(config, TaskConfig):
        return TaskPlan.of(config, hardware, (prompt or 0) + (response or 0) or None, folders)
    return RunPlan.of(config, hardware, mean_lengths(config.data, prompt, response), folders, variant_of)


def duration(seconds: float) -> str:
    """Return seconds in the unit that people would use."""
    if seconds < MINUTE:
        return f"{seconds:.0f} s"
    return f"{seconds / MINUTE:.1f} min" if seconds < HOUR else f"{seconds / HOUR:.1f} h"
