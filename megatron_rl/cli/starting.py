"""megatron-rl init: a project to begin with."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from megatron_rl.checkpoint.folders import HF_MODEL
from megatron_rl.checkpoint.storage import writing
from megatron_rl.cli.options import check_number
from megatron_rl.cli.output import check_output_folder, say
from megatron_rl.config.file_kinds import FILE, NOTHING, kind_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.trainer import MOST_RANKS
from megatron_rl.data.row_files import count_rows
from megatron_rl.errors import ConfigError
from megatron_rl.observe.console import quiet_libraries
from megatron_rl.observe.program import next_command
from megatron_rl.planning.hub_cache import cached_model, is_hub_id
from megatron_rl.starter.project import (
    CONFIG,
    NO_TRUTH,
    PROMPT_OPTION,
    TRUTH_OPTION,
    WRITTEN,
    check_name,
    planned_run,
    write_project,
    write_tiny_model,
)
from megatron_rl.starter.task_kinds import TASK_KINDS

TINY, SCORE, MODEL = "tiny", "score", "model"


class KindName(StrEnum):
    """The names of `TASK_KINDS`, which a test compares."""

    EXACT = "exact"
    MATH = "math"
    SCORE = "score"


def init_command(
    folder: Annotated[Path, typer.Argument(help="The folder to write. No file in it is replaced.")],
    model: Annotated[
        str | None,
        typer.Option(help="A Hugging Face folder, or the Hub's name of a model in the local cache; tiny: one is made."),
    ] = None,
    kind: Annotated[
        KindName | None, typer.Option(help="; ".join(f"{n}: {k.about}" for n, k in TASK_KINDS.items()))
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs to train on; 0: one CPU process.")] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Your questions, jsonl or parquet. Default: some are made up.")
    ] = None,
    val_data: Annotated[
        Path | None, typer.Option("--val-data", help="Questions for validation. Default: some rows of --data.")
    ] = None,
    prompt_key: Annotated[
        str | None, typer.Option(PROMPT_OPTION, help="Column of prompts, where its name does not say it.")
    ] = None,
    ground_truth_key: Annotated[
        str | None, typer.Option(TRUTH_OPTION, help=f"Column of expected answers; {NO_TRUTH}: there are none.")
    ] = None,
) -> None:
    """Write a configuration, a reward function and data files of a run of your own.

    With --data the run trains on a file of yours; its columns are found by their names.

    In a terminal the command asks for the model, the kind of task and the GPUs, where no option gives them.
    """
    is_unanswered = model is None or gpus is None or (kind is None and data is None)
    if is_unanswered and not sys.stdin.isatty():
        rule = (
            "give --model, --gpus, and --kind or --data: the input is no terminal, so this command cannot ask for them"
        )
        raise ConfigError(f"{rule}; try: --model tiny --kind score --gpus 0")
    if data is None and (val_data, prompt_key, ground_truth_key) != (None, None, None):
        rule = f"--val-data, {PROMPT_OPTION} and {TRUTH_OPTION} are about the file of --data"
        raise ConfigError(f"{rule}; try: --data FILE")
    model = typer.prompt("Model folder, or tiny", default=TINY) if model is None else model
    name = None if kind is None else kind.value
    if name is None and data is None:
        name = typer.prompt("Kind of task: " + ", ".join(TASK_KINDS), default=SCORE)
        check_kind(name)
    num_gpus = typer.prompt("GPUs, 0 for a CPU", default=0, type=int) if gpus is None else gpus
    check_number("--gpus", num_gpus, 0, MOST_RANKS)
    check_output_folder("FOLDER", folder)
    check_name("FOLDER", os.path.realpath(folder))
    with writing(), removing_if_refused(folder):
        written = made_model(folder, model)
        if data is None:
            assert name is not None
            config = write_project(folder, written, name, num_gpus, model == TINY)
        else:
            quiet_libraries()
            from megatron_rl.starter.own_project import own_project  # tokenizers are only for data of one's own

            files, options = (data, val_data), (prompt_key, ground_truth_key)
            config, lines = own_project(folder, written, name, num_gpus, model == TINY, files, options, ask)
            for line in lines:
                say(line)
    say_next(folder, config, num_gpus)


def check_kind(name: str) -> None:
    """Raise ConfigError for a kind that does not exist."""
    if name not in TASK_KINDS:
        raise ConfigError(f"kind {name} must be one of {', '.join(TASK_KINDS)}; try: {SCORE}")


def ask(option: str, question: str, choices: Sequence[str]) -> str:
    """Return the user's choice. Raises ConfigError, with the choices, where there is nobody to ask."""
    if not sys.stdin.isatty():
        raise ConfigError(f"{question}; give {option} with one of {', '.join(choices)}; try: {option} {choices[0]}")
    while (answer := typer.prompt(f"{question} ({', '.join(choices)})", default=choices[0])) not in choices:
        say(f"must be one of {', '.join(choices)}")
    return str(answer)


def say_next(folder: Path, config: RunConfig, num_gpus: int) -> None:
    """Print what was written, what it will take, and the next commands."""
    written = [name for name in WRITTEN if (folder / name).exists()]
    data = config.data
    most = data.val_max_samples if data.val_max_samples > 0 else sys.maxsize
    say(str(planned_run(config, min(most, count_rows(str(data.val_files), sys.maxsize)))))
    say(f"written to {folder}: {', '.join(written)}. Change them as you like, and go on:")
    file = folder / CONFIG
    say(f"  {next_command('doctor')}")
    say(f"  {next_command('plan', '--config', file)}")
    say(f"  {next_command('train', '--config', file, *([] if num_gpus else ['--local']))}")
    say(f"  {next_command('view', folder / 'output')}")


@contextmanager
def removing_if_refused(folder: Path) -> Iterator[None]:
    """Where the block raises, remove the tiny model and the folders that it has made."""
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    model = folder / MODEL
    has_model = os.path.lexists(model)
    try:
        yield
    except BaseException:
        if not has_model:
            shutil.rmtree(model, ignore_errors=True)
        for each in new:
            with suppress(OSError):  # absent, or not empty
                each.rmdir()
        raise


def made_model(folder: Path, model: str) -> str:
    """Return the model for run.yaml: a folder, or a name of the Hub that the local cache has; make the tiny one.

    Raises ConfigError where there is no such model.
    """
    if model == TINY:
        target = folder / MODEL
        if kind_of(target) == NOTHING:
            quiet_libraries()
            write_tiny_model(target)
        return str(target.resolve())
    if is_hub_id(model):
        if cached_model(model) is None:
            raise ConfigError(f"--model {model} is not in the local Hugging Face cache; try: hf download {model}")
        return model
    path = Path(os.path.expanduser(model))  # leaves the name of a user whom the system does not know
    if kind_of(path / "config.json") != FILE:
        is_run = kind_of(path / HF_MODEL / "config.json") == FILE
        advice = f"{path / HF_MODEL}, the model that this run has trained" if is_run else "tiny, which makes one"
        raise ConfigError(f"--model {model} is no folder with a config.json; try: --model {advice}")
    check_name("--model", os.path.realpath(path))
    return str(path.resolve())
