"""Read a configuration for a command, with the violations of its keys, its values and the files it names, and its keys
without effect.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.config.eval_config import for_evaluation
from megatron_rl.config.keys import CRITIC, REF, followed_keys
from megatron_rl.config.load import read_run
from megatron_rl.config.problems import nearest_name
from megatron_rl.config.roles import REWARD_MODEL, roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.task_config import for_task
from megatron_rl.config.tasks import PPO, TASKS, WITHOUT_ROLLOUT
from megatron_rl.config.verl_compat.default_differences import RESULTS, Difference, differences, is_ported
from megatron_rl.config.verl_compat.translate import Kind, Note
from megatron_rl.errors import ConfigError, Violation
from megatron_rl.planning.file_rules import tracker_notes
from megatron_rl.planning.hub_cache import with_local_models
from megatron_rl.planning.merge_choice import with_merge_chosen
from megatron_rl.planning.preflight import examined

COMMANDS = {PPO: "train"} | {task: task for task in WITHOUT_ROLLOUT}
"""Task -> the command that trains it."""


@dataclass(frozen=True)
class CheckedConfig:
    """A configuration and the violations of its keys, its values and the files it names.

    notes: how verl's keys were translated. different: unset keys with another default in verl. unread: ignored parts of
    model folders that may be there on purpose. idle: lines on keys that were chosen for the model, and
    on keys of roles that the run does not have. is_from_verl:
    whether any key is verl's, or `port` wrote the file. trackers: lines on those that are not installed.
    """

    config: RunConfig | None
    violations: list[Violation]
    notes: list[Note] = field(default_factory=list)
    different: list[Difference] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    is_from_verl: bool = False
    trackers: list[str] = field(default_factory=list)

    def lines(self, whole: bool = True) -> list[str]:
        """Notes on verl's keys, on keys without effect, on verl's defaults, and on unread weights, one line each.

        Defaults are for runs that come from verl. whole: also those that change speed or files alone.
        """
        notes = [f"{note.kind.value}: {note}" for note in self.notes]
        different = self.different if self.is_from_verl else []
        shown = [one for one in different if whole or one.default.changes == RESULTS]
        lines = [*notes, *self.idle, *self.trackers, *map(str, shown), *self.unread]
        others = len(different) - len(shown)
        more = f"differs from verl: {others} more default{'s' * (others > 1)}, of speed and files; --all names them"
        return [*lines, more] if others else lines

    def as_json(self) -> dict[str, Any]:
        """The notes as data."""
        return {
            "notes": [{"kind": note.kind.value, "key": note.setting.key, "text": str(note)} for note in self.notes],
            "differs_from_verl": {
                key.default.key: {"here": key.here, "verl": key.default.verl} for key in self.different
            },
            "unread_weights": self.unread,
            "without_effect": self.idle,
        }


def checked(
    path: Path,
    overrides: Sequence[str] | None,
    without_files: bool = False,
    change: Callable[[RunConfig], RunConfig] | None = None,
    task: str | None = None,
) -> CheckedConfig:
    """Read a configuration and check its rules. change: applied before the check. task: that of a command."""
    reading = read_run(path, overrides or (), task)
    notes = [note for note in reading.notes if note.kind is not Kind.UNSUPPORTED]
    if reading.config is None:
        return CheckedConfig(None, reading.violations, notes)
    run_config = with_local_models(reading.config if change is None else change(reading.config))
    run_config, chosen = with_merge_chosen(run_config, reading.given)
    # The defaults that are compared are those of verl's PPO.
    different = differences(reading.config, reading.given) if run_config.generates else []
    violations, unread = examined(run_config, config_only=without_files)
    idle = [*chosen, *idle_keys(run_config, reading.given)]
    from_verl = bool(reading.notes) or is_ported(path)
    trackers = tracker_notes(run_config.trainer) if without_files else []  # otherwise among the violations
    return CheckedConfig(
        run_config, [*reading.violations, *violations], notes, different, unread, idle, from_verl, trackers
    )


def commanded(config: RunConfig, task: str) -> RunConfig:
    """The configuration for the task of a command. Raises ConfigError if it names another task."""
    named, command = config.trainer.stage, COMMANDS.get(config.trainer.stage, "")
    if command and named not in (PPO, task):
        rule = f"trainer.stage={named} is what `megatron-rl {command}` trains, and this is `{COMMANDS[task]}`"
        raise ConfigError(f"this run cannot start: {rule}; try: megatron-rl {command}, or trainer.stage={task}")
    return for_task(config, task)


def only_ppo(config: RunConfig, command: str) -> RunConfig:
    """Return the configuration. Raises ConfigError for a task without generation: the command is for PPO alone."""
    if config.trainer.stage in WITHOUT_ROLLOUT:
        rule = f"megatron-rl {command} is for PPO alone, and trainer.stage={config.trainer.stage}"
        raise ConfigError(f"{rule}; try: megatron-rl plan, once for each layout")
    return config


def planned_task(config: RunConfig, task: str | None) -> RunConfig:
    """The configuration for the task of `plan --stage`; None: the task that it names. Of an evaluation its own.

    Raises ConfigError for an unknown task. An unknown `trainer.stage` is reported by its constraint.
    """
    if task is not None and task not in TASKS:
        raise ConfigError(
            f"--stage {task} must be one of {', '.join(TASKS)}; did you mean: {nearest_name(task, TASKS)}"
        )
    name = config.trainer.stage if task is None else task
    planned = for_task(config, name) if name in TASKS else config
    return for_evaluation(planned) if planned.generates and planned.trainer.val_only else planned


MOST_NAMED = 5
GROUPS = {
    CRITIC: ("critic", (f"{CRITIC}.",)),
    REF: ("reference", (f"{REF}.",)),
    REWARD_MODEL: ("reward model", ("reward_model.model.", "reward_model.megatron.")),
}
"""Key of a role -> what it is called, and how the keys begin that nothing else reads."""


def idle_keys(config: RunConfig, given: Collection[str]) -> list[str]:
    """Return a line for each absent role of a PPO run of which keys are given, with the first of them.

    given: the keys that a user has set. A key whose value a key elsewhere follows is not idle. An evaluation leaves
    roles out by itself, and says nothing.
    """
    if not config.generates or config.trainer.val_only:
        return []
    present = {role.key for role in roles_of(config)}
    absent = {key: row for key, row in GROUPS.items() if key not in present}
    if REWARD_MODEL in absent and REWARD_MODEL in config.judges:  # its prompt goes to the policy, or to nobody
        absent[REWARD_MODEL] = ("judge with ranks", ("reward_model.megatron.",))
    if not absent:
        return []
    starts = tuple(f"{group}." for group in absent)
    followed = {leader for key, leader in followed_keys(config).items() if not key.startswith(starts)}
    lines = []
    for group, (name, begins) in absent.items():
        keys = sorted(key for key in given if key.startswith(begins) and key not in followed | {f"{group}.enable"})
        more = f" and {len(keys) - MOST_NAMED} more" if len(keys) > MOST_NAMED else ""
        if keys:
            lines.append(f"without effect: {', '.join(keys[:MOST_NAMED])}{more}, because this run has no {name}")
    return lines
