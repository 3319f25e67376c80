"""A configuration as a command reads it, with whatever is wrong with its keys, its values and the files it names."""

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
"""Stage -> the command that trains it."""


@dataclass(frozen=True)
class Checked:
    """A configuration and everything that is wrong with its keys, its values and the files it names.

    notes: what verl's keys became. different: keys left alone whose default is another in verl. unread: what of model
    folders is not read though it may have been meant.
    """

    config: RunConfig | None
    violations: list[Violation]
    notes: list[Note] = field(default_factory=list)
    different: list[Difference] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """What of verl is not as in verl, and what is not read. Lines, because they would not fit into a table."""
        return [*(f"{note.kind.value}: {note}" for note in self.notes), *map(str, self.different), *self.unread]

    def as_json(self) -> dict[str, Any]:
        """The same as data."""
        return {
            "notes": [{"kind": note.kind.value, "key": note.setting.key, "text": str(note)} for note in self.notes],
            "differs_from_verl": {
                one.default.key: {"here": one.here, "verl": one.default.verl} for one in self.different
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
    """Read a configuration and check its rules. change: what to make of it before. stage: what a command trains."""
    reading = read_run(path, overrides or (), stage)
    notes = [note for note in reading.notes if note.kind is not Kind.UNSUPPORTED]
    if reading.config is None:
        return Checked(None, reading.violations, notes)
    run_config = with_local_models(reading.config if change is None else change(reading.config))
    # The defaults that are compared are those of verl's PPO.
    is_ppo = run_config.trainer.stage not in WITHOUT_ROLLOUT
    different = differences(reading.config, reading.given) if is_ppo else []
    found, unread = examined(run_config, config_only=without_files)
    return Checked(run_config, [*reading.violations, *found], notes, different, unread)


def commanded(config: RunConfig, stage: str) -> RunConfig:
    """The configuration as the stage of a command sees it. Raises ConfigError where it is that of another stage."""
    named, command = config.trainer.stage, COMMANDS.get(config.trainer.stage, "")
    if command and named not in (PPO, stage):
        rule = f"trainer.stage={named} is what `megatron-rl {command}` trains, and this is `{COMMANDS[stage]}`"
        raise ConfigError(f"this run cannot start: {rule}; nearest: megatron-rl {command}, or trainer.stage={stage}")
    return as_stage(config, stage)


def only_ppo(config: RunConfig, command: str) -> RunConfig:
    """The same. Raises ConfigError for a stage that does not generate, of a command that is for PPO alone."""
    if config.trainer.stage in WITHOUT_ROLLOUT:
        rule = f"megatron-rl {command} is for PPO alone, and trainer.stage={config.trainer.stage}"
        raise ConfigError(f"{rule}; nearest: megatron-rl plan, once for each layout")
    return config


def staged(config: RunConfig, stage: str | None) -> RunConfig:
    """The configuration as a stage sees it; None: the one that it names. An unknown one is left to its rule."""
    name = config.trainer.stage if stage is None else stage
    if stage is not None and stage not in STAGES:
        raise ConfigError(f"--stage {stage} must be one of {', '.join(STAGES)}; nearest: {nearest_name(stage, STAGES)}")
    return as_stage(config, name) if name in STAGES else config
