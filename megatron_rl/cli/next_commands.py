"""The commands that lead on from a run that has ended: printed as its last lines, so that they can be copied."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_rl.checkpoint.folders import HF_MODEL, find
from megatron_rl.cli.output import say
from megatron_rl.config.algorithms import has_scores
from megatron_rl.config.eval_config import for_evaluation, is_read
from megatron_rl.config.one_rank import collapsed
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.tasks import PPO, REWARD
from megatron_rl.errors import ConfigError
from megatron_rl.observe.loggers import METRICS_FILE
from megatron_rl.observe.program import next_command
from megatron_rl.planning.checked_config import checked

FOLDER_KEY = "trainer.default_local_dir"


def say_next(config_file: Path, overrides: Sequence[str] | None, run: RunConfig, options: Sequence[str]) -> None:
    """Print what can be done with the run's folder. options: --local and --collapse, where they were given."""
    lines = next_lines(config_file, overrides or (), run, options)
    if lines:
        say("Next:")
    for line in lines:
        say(f"  {line}")


def next_lines(config_file: Path, overrides: Sequence[str], run: RunConfig, options: Sequence[str]) -> list[str]:
    """Return the commands of `say_next`, each with a comment behind it."""
    folder, lines = Path(run.trainer.default_local_dir), list[str]()
    if (folder / METRICS_FILE).is_file():
        lines.append(f"{next_command('view', folder)}  # curves, times, responses and their tokens on one page")
    has_model = (folder / HF_MODEL).is_dir()
    if run.trainer.stage == PPO and (has_model or find(folder)):
        name, what = ("eval", "score") if has_scores(run) else ("generate", "write")
        kept = evaluated(config_file, overrides, "--collapse" in options)
        words = (name, "--config", config_file, "--model", folder, "--out", f"{folder}_{name}", *options, *kept)
        lines.append(f"{next_command(*words)}  # {what} responses to data.val_files")
    elif has_model:
        key = "reward_model.model.path" if run.trainer.stage == REWARD else "actor_rollout_ref.model.path"
        lines.append(f"{key}={folder / HF_MODEL}  # the model, for the next run")
    return lines


def evaluated(config_file: Path, overrides: Sequence[str], collapse: bool) -> list[str]:
    """Return the overrides of a run that its evaluation reads: all, if it could not start without the others."""
    keys = {override: override.partition("=")[0].lstrip("+~") for override in overrides}
    every = [override for override in overrides if keys[override] != FOLDER_KEY]
    read = [override for override in every if is_read(keys[override])]
    if read == every:
        return every

    def change(config: RunConfig) -> RunConfig:
        return for_evaluation(collapsed(config) if collapse else config)

    try:
        refused = checked(config_file, [*read, "trainer.val_only=true"], change=change, task=PPO).violations
    except ConfigError:
        return every
    return every if refused else read
