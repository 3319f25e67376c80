"""The command line: `megatron-rl COMMAND`; `cli.commands` lists the commands.

Configuration mistakes are reported before torch, Ray or vLLM is imported; exit codes are those of `errors.py`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from megatron_rl import __version__
from megatron_rl.cli.commands import COMMANDS, RUNS
from megatron_rl.cluster.loading import leaving_none_empty
from megatron_rl.cluster.signals import quit_on_signals, restore_signals
from megatron_rl.errors import ConfigError, MegatronRLError, StorageError
from megatron_rl.observe.console import drop_unread_output
from megatron_rl.observe.program import name_hint
from megatron_rl.observe.terminal import Terminal

INDEX = Path(__file__).parents[2] / "docs" / "README.md"
DOCS = f"Docs: {INDEX if INDEX.is_file() else 'docs/README.md in the repository'}"
"""Where the pages are: next to an editable installation, else in the repository alone."""

RESUME = ("--resume", "--resume-from", "--resume-from-checkpoint", "--resume_from_checkpoint")
FLAGS = ("--local", "--collapse", "--json", "--all", "--without-files", "--dry-run")
"""Options without a value, which may be before a file's name."""

app = typer.Typer(
    help="Train language models with RL (PPO, GRPO), SFT, DPO and reward models: Megatron trains, vLLM generates.",
    epilog=f"megatron-rl COMMAND --help has an example of each. {DOCS}",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
for command in COMMANDS:
    for name in (command.name, *command.other_names):
        app.command(
            name,
            rich_help_panel=command.panel,
            epilog=f"Example: megatron-rl {name} {command.example}",
            hidden=name != command.name,
            context_settings={"ignore_unknown_options": True} if name == "port" else None,
        )(command.function)


def print_version(wanted: bool) -> None:
    """Print the version and end, where it is wanted."""
    if wanted:
        typer.echo(f"megatron-rl {__version__}")
        raise typer.Exit


@app.callback()
def all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Declare the options of the program itself; `version` is used by its callback."""


def refuse_hydra_options(arguments: Sequence[str]) -> None:
    """Raise ConfigError for Hydra's names of configuration files, which `port` alone reads; says what to do."""
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in ("--config-path", "--config-name", "--config-dir") and arguments[0] != "port":
            rule = "is Hydra's, and no file of verl's is read here: its values are verl's defaults"
            raise ConfigError(f"{name} {rule}; try: --config FILE.yaml, made by megatron-rl port SCRIPT.sh")


def refuse_slips(arguments: Sequence[str]) -> None:
    """Raise ConfigError for an option to resume, and for a configuration file without `--config`. It says the fix."""
    command, *given = arguments or ("",)
    if command in RUNS and any(text.partition("=")[0] in RESUME for text in given):
        resumed = "it resumes by itself from the newest checkpoint in trainer.default_local_dir"
        further = "trainer.resume_mode=resume_path trainer.resume_from_path=FOLDER takes another checkpoint"
        raise ConfigError(f"a run needs no option to resume: {resumed}; {further}")
    function = next((one.function for one in COMMANDS if command in (one.name, *one.other_names)), None)
    if function is None or "config" not in inspect.signature(function).parameters:
        return
    if any(text.partition("=")[0] == "--config" for text in given):
        return
    for before, text in pairwise(["", *given]):
        is_value = before.startswith("-") and before not in FLAGS
        if text.endswith((".yaml", ".yml")) and "=" not in text and not text.startswith("-") and not is_value:
            raise ConfigError(f"{text} has no option before it; did you mean: --config {text}")


def print_error(error: MegatronRLError) -> None:
    """Print an error that is meant for the user, without a traceback."""
    message = Text.assemble((type(error).__name__, "bold red"), f": {error}")
    console = Terminal(stderr=True)
    console.print(message, soft_wrap=True, highlight=False)
    if hint := name_hint(str(error)):
        console.print(hint, soft_wrap=True, highlight=False, markup=False)


def main() -> None:
    """Run the command line; an error we raise on purpose becomes one message and its exit code, without a traceback.

    Until a run's libraries are imported, a signal ends it at once.
    """
    drop_unread_output()
    if sys.argv[1:2] and sys.argv[1] in RUNS:
        quit_on_signals()
    else:
        restore_signals()
    try:
        refuse_hydra_options(sys.argv[1:])
        refuse_slips(sys.argv[1:])
        with leaving_none_empty():
            app(prog_name="megatron-rl")
    except MegatronRLError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is None or sys.argv[1] in RUNS:
            raise
        storage = StorageError(f"{error.filename} cannot be used: {error.strerror}")
        print_error(storage)
        sys.exit(storage.exit_code)
    finally:
        restore_signals()
