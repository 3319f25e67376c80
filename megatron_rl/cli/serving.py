"""megatron-rl serve: training as a service, for clients of the Tinker API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_rl.cli.options import ConfigPath, Overrides
from megatron_rl.cli.tasks import Collapse, Local, imports_of, made_ready, startable
from megatron_rl.config.tasks import PPO


def serve_command(
    config: ConfigPath,
    overrides: Overrides = None,
    keys: Annotated[
        Path | None, typer.Option("--keys", help="A file of mode 600 with a line NAME KEY for each tenant.")
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 8000,
    local: Local = False,
    collapse: Collapse = False,
    replay: Annotated[
        Path | None, typer.Option("--replay", help="A service's journal, to repeat bit for bit instead of serving.")
    ] = None,
    journal_mb: Annotated[
        float, typer.Option("--journal-mb", min=0, help="Replace a larger journal by a snapshot; 0: never.")
    ] = 1024,
) -> None:
    """Serve the Tinker API on this machine: clients train and sample with loops of their own."""
    run_config = made_ready(startable(config, overrides, PPO, collapse, serves=True), local)
    run_config.trainer.save_freq = 1  # the journal saves every command: a signal ends no command in the middle
    with imports_of(run_config):
        from megatron_rl.serve.opened import serve
        from megatron_rl.serve.tenant_keys import read_keys

        known = {} if keys is None and replay is not None else read_keys(Path("keys") if keys is None else keys)
    serve(run_config, known, port, local, replay, journal_mb * 2**20)
