"""megatron-rl init: a project to begin with."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from megatron_rl.checkpoint.storage import writing
from megatron_rl.cli.options import check_number
from megatron_rl.cli.output import check_output_folder, say
from megatron_rl.config.file_kinds import FILE, NOTHING, kind_of
from megatron_rl.config.trainer import MOST_RANKS
from megatron_rl.errors import ConfigError
from megatron_rl.observe.console import quiet_libraries
from megatron_rl.observe.program import next_command
from megatron_rl.starter.project import CONFIG, check_name, write_project
from megatron_rl.starter.task_kinds import TASK_KINDS

TINY = "tiny"


class KindName(StrEnum):
    """The names of `TASK_KINDS`, which a test compares."""

    EXACT = "exact"
    MATH = "math"
    SCORE = "score"


def init_command(
    folder: Annotated[Path, typer.Argument(help="The folder to write. No file in it is replaced.")],
    model: Annotated[
        str | None, typer.Option(help="A Hugging Face folder; tiny: a model that knows nothing is made.")
    ] = None,
    kind: Annotated[
        KindName | None, typer.Option(help="; ".join(f"{n}: {k.about}" for n, k in TASK_KINDS.items()))
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs to train on; 0: one CPU process.")] = None,
) -> None:
    """Write a configuration, a reward function and data files of a run of your own, from three answers.

    Asks for what no option gives, where there is someone to ask.
    """
    if None in (model, kind, gpus) and not sys.stdin.isatty():
        rule = "give --model, --kind and --gpus: the input is no terminal, so this command cannot ask for them"
        raise ConfigError(f"{rule}; try: --model tiny --kind score --gpus 0")
    model = typer.prompt("Model folder, or tiny", default=TINY) if model is None else model
    name = typer.prompt("Kind of task: " + ", ".join(TASK_KINDS), default="score") if kind is None else kind.value
    if name not in TASK_KINDS:
        raise ConfigError(f"kind {name} must be one of {', '.join(TASK_KINDS)}; try: score")
    num_gpus = typer.prompt("GPUs, 0 for a CPU", default=0, type=int) if gpus is None else gpus
    check_number("--gpus", num_gpus, 0, MOST_RANKS)
    check_output_folder("FOLDER", folder)
    check_name("FOLDER", os.path.realpath(folder))
    with writing():
        path = made_model(folder, model)
        write_project(folder, path, name, num_gpus, model == TINY)
    config = folder / CONFIG
    say(f"written to {folder}: run.yaml, reward.py, train.jsonl, val.jsonl. Change them, and go on:")
    say(f"  {next_command('plan', '--config', config)}")
    say(f"  {next_command('train', '--config', config, *([] if num_gpus else ['--local']))}")
    say(f"  {next_command('view', folder / 'output')}")


def made_model(folder: Path, model: str) -> Path:
    """Return the folder of the model; make the tiny one. Raises ConfigError if a named folder has no model."""
    if model != TINY:
        path = Path(os.path.expanduser(model))  # leaves the name of a user whom the system does not know
        if kind_of(path / "config.json") != FILE:
            raise ConfigError(f"--model {model} is no folder with a config.json; try: --model tiny, which makes one")
        check_name("--model", os.path.realpath(path))
        return path
    target = folder / "model"
    if kind_of(target) == NOTHING:
        quiet_libraries()
        from megatron_rl.starter.tiny_model import write_tiny_model

        write_tiny_model(target)
    return target
