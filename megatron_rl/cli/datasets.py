"""megatron-rl dataset: rows for a run, made of tasks of another package or of a file with other columns."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from megatron_rl.cli.options import check_number
from megatron_rl.cli.output import refuse_to_lose_output, say
from megatron_rl.config.adapter_files import PREFIX, WITHOUT_PACKAGE, adapter_names, file_of
from megatron_rl.config.problems import nearest_name
from megatron_rl.data.made_rows import chosen_columns, rows_of_file, rows_of_tasks, write_rows
from megatron_rl.errors import ConfigError

MOST_ROWS = 10_000_000


def dataset_command(
    source: Annotated[
        str, typer.Option("--from", help="ADAPTER:NAME, such as reasoning_gym:chain_sum; or a parquet or jsonl file.")
    ],
    out: Annotated[Path, typer.Option(help="The file to write: .parquet or .jsonl.")],
    settings: Annotated[list[str] | None, typer.Argument(help="Settings of the adapter's tasks: min_terms=2")] = None,
    python: Annotated[
        str | None, typer.Option(help="The interpreter that has the package, as multi_turn.python in a run.")
    ] = None,
    size: Annotated[int, typer.Option(help="Number of rows that an adapter makes.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the tasks.")] = 0,
    prompt: Annotated[str | None, typer.Option(help="A file's column with the prompt: a text, or messages.")] = None,
    answer: Annotated[str | None, typer.Option(help="A file's column with the ground truth.")] = None,
    after: Annotated[str, typer.Option(help="The truth is what follows this text in the column: #### in gsm8k.")] = "",
    data_source: Annotated[
        str | None, typer.Option(help="The rows' data_source; default: the value of --from.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Replace the file, if it exists.")] = False,
) -> None:
    """Write rows for a run (verl's schema), made of another package's tasks or of a file with other columns."""
    refuse_to_lose_output()
    check_number("--size", size, 1, MOST_ROWS)
    if out.exists() and not force:
        raise ConfigError(f"--out {out} exists; try: --force, or another name")
    adapter, _, name = source.partition(":")
    if adapter in adapter_names():
        rows = rows_of_tasks(_tasks(adapter, name, size, seed, python, _values(settings or [])), data_source or source)
    elif Path(source).suffix in (".parquet", ".jsonl"):
        columns = chosen_columns(source, prompt, answer, after)
        say(f"prompt: {columns.prompt}; ground truth: {columns.truth or 'none'}")
        rows = rows_of_file(source, columns, data_source or Path(source).stem)
    else:
        near = nearest_name(adapter, adapter_names())
        what = f"must be a .parquet or .jsonl file, or NAME of one of {', '.join(adapter_names())}"
        raise ConfigError(f"--from {source} {what}; did you mean: {near}:NAME")
    write_rows(rows, out)
    say(f"{len(rows)} rows: {out}")


def _tasks(
    adapter: str, name: str, size: int, seed: int, python: str | None, settings: dict[str, Any]
) -> list[dict[str, Any]]:
    from megatron_rl.agents.observation import EpisodeError
    from megatron_rl.agents.other_interpreter import InterpreterProgram

    if python is None and adapter in WITHOUT_PACKAGE:
        python = sys.executable
    if python is None:
        raise ConfigError(f"--from {adapter}:{name} needs --python, the interpreter that has the adapter's package")
    file = file_of(f"{PREFIX}{adapter}", "--from")
    hello = {"file": file, "name": "rows", "methods": [], "kwargs": settings}
    program = InterpreterProgram(python, "--python", hello, f"--from {adapter}:{name}")

    async def made() -> Any:
        try:
            return await program.call(0, "rows", name, size, seed)
        finally:
            await program.close()

    try:
        tasks: list[dict[str, Any]] = asyncio.run(made())
    except EpisodeError as error:
        raise ConfigError(f"--from {adapter}:{name}: {error}") from None
    return tasks


def _values(settings: list[str]) -> dict[str, Any]:
    """Return KEY=VALUE settings as a mapping; values are YAML. Raises ConfigError for others."""
    values = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"{setting} must be KEY=VALUE, a setting of the adapter's tasks")
        values[name] = yaml.safe_load(text)
    return values
