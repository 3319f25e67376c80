"""Read a configuration for a command, with the violations of its keys, its values and the files it names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.config.as_stage import as_stage
from megatron_rl.config.foreign.defaults import Difference, differences
from megatron_rl.config.foreign.translate import Kind, Note
from megatron_rl.config.load import read_run
from megatron_rl.config.problems import nearest_name
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.tasks import PPO, STAGES, WITHOUT_ROLLOUT
from megatron_rl.errors import ConfigError, Violation
from megatron_rl.ledger.planner.hub_cache import with_local_models
from megatron_rl.ledger.planner.preflight import examined

COMMANDS = {PPO: "train"} | {stage: stage for stage in WITHOUT_ROLLOUT}
"""Task -> the command that trains it."""


@dataclass(frozen=True)
class Checked:
    """A configuration and the violations of its keys, its values and the files it names.

    notes: how verl's keys were translated. different: unset keys with another default in verl. unread: ignored parts of
    model folders that may be there on purpose.
    """

    config: RunConfig | None
    violations: list[Violation]
    notes: list[Note] = field(default_factory=list)
    different: list[Difference] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Notes on verl's keys and defaults, and on unread weights, one line each."""
        return [*(f"{note.kind.value}: {note}" for note in self.notes), *map(str, self.different), *self.unread]

    def as_json(self) -> dict[str, Any]:
        """The notes as data."""
        return {
            "notes": [{"kind": note.kind.value, "key": note.setting.key, "text": str(note)} for note in self.notes],
            "differs_from_verl": {
                key.default.key: {"here": key.here, "verl": key.default.verl} for key in self.different
            },
            "unread_weights": self.unread,
        }


def checked(
    path: Path,
    overrides: Sequence[str] | None,
    without_files: bool = False,
    change: Callable[[RunConfig], RunConfig] | None = None,
    stage: str | None = None,
) -> Checked:
    """Read a configuration and check its rules. change: applied before the check. stage: the task of a command."""
    reading = read_run(path, overrides or (), stage)
    notes = [note for note in reading.notes if note.kind is not Kind.UNSUPPORTED]
    if reading.config is None:
        return Checked(None, reading.violations, notes)
    run_config = with_local_models(reading.config if change is None else change(reading.config))
    # The defaults that are compared are those of verl's PPO.
    is_ppo = run_config.trainer.stage not in WITHOUT_ROLLOUT
    different = differences(reading.config, reading.given) if is_ppo else []
    violations, unread = examined(run_config, config_only=without_files)
    return Checked(run_config, [*reading.violations, *violations], notes, different, unread)


def commanded(config: RunConfig, stage: str) -> RunConfig:
    """The configuration for the task of a command. Raises ConfigError if it names another task."""
    named, command = config.trainer.stage, COMMANDS.get(config.trainer.stage, "")
    if command and named not in (PPO, stage):
        rule = f"trainer.stage={named} is what `megatron-rl {command}` trains, and this is `{COMMANDS[stage]}`"
        raise ConfigError(f"this run cannot start: {rule}; nearest: megatron-rl {command}, or trainer.stage={stage}")
    return as_stage(config, stage)


def only_ppo(config: RunConfig, command: str) -> RunConfig:
    """Return the configuration. Raises ConfigError for a task without generation: the command is for PPO alone."""
    if config.trainer.stage in WITHOUT_ROLLOUT:
        rule = f"megatron-rl {command} is for PPO alone, and trainer.stage={config.trainer.stage}"
        raise ConfigError(f"{rule}; nearest: megatron-rl plan, once for each layout")
    return config


def staged(config: RunConfig, stage: str | None) -> RunConfig:
    """The configuration for a task; None: the task it names. An unknown task is reported by its constraint."""
    name = config.trainer.stage if stage is None else stage
    if stage is not None and stage not in STAGES:
        raise ConfigError(f"--stage {stage} must be one of {', '.join(STAGES)}; nearest: {nearest_name(stage, STAGES)}")
    return as_stage(config, name) if name in STAGES else config
