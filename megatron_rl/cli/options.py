"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigPath = Annotated[Path, typer.Option("--config", help="YAML file, such as configs/demo_cpu.yaml.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Dotted overrides: trainer.seed=2 data.shuffle=false")]
