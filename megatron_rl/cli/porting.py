"""megatron-rl port: a configuration file from a launch script of verl."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_rl.cli.output import check_output_file, refuse_to_lose_output, say, write_output
from megatron_rl.cluster.signals import exit_on_signals
from megatron_rl.config.verl_compat.translate import Kind
from megatron_rl.observe.terminal import Terminal
from megatron_rl.port.port import SOMETHING_LOST, port


def port_command(
    arguments: Annotated[
        list[str],
        typer.Argument(help="SCRIPT.sh or verl's YAML, and Hydra arguments; or these alone."),
    ],
    out: Annotated[Path | None, typer.Option(help="The file to write. Default: to stdout.")] = None,
    trust_script: Annotated[
        bool, typer.Option("--trust-script", help="Run the script where nothing confines it: it can do what you can.")
    ] = False,
) -> None:
    """Turn a launch script of verl into a configuration file; says what is renamed, ignored or not supported.

    The script's shell is run with stubs for every program, and cannot change files, open sockets or send signals. Exit
    codes: 0 nothing of substance is lost, 3 something is.
    """
    check_output_file("--out", out)
    first = None if "=" in arguments[0] or arguments[0].startswith("-") else Path(arguments[0])
    exit_on_signals()
    result = port(first, arguments if first is None else arguments[1:], os.environ, trust_script)
    console = Terminal(stderr=out is None)
    if out is None:
        sys.stdout.write(result.yaml())
        refuse_to_lose_output()
    else:
        write_output(out, result.yaml().encode())
    for line in (*result.lists(), *([f"written to {out}"] if out is not None else [])):
        say(line, console)
    raise typer.Exit(SOMETHING_LOST if result.of(Kind.UNSUPPORTED) else 0)
