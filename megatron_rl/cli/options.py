"""Options that several commands share, and the ranges of their numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import ConfigError, shown

ConfigPath = Annotated[Path, typer.Option("--config", help="YAML file, such as configs/demo_cpu.yaml.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Dotted overrides: trainer.seed=2 data.shuffle=false")]

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]


def check_number(option: str, value: float | None, least: float, most: float, of_most: str = "") -> None:
    """Raise ConfigError for a given number out of its range. of_most: the key that the upper bound comes from."""
    if value is None or least <= value <= most:
        return
    nearest = least if math.isnan(value) else min(max(value, least), most)
    rule = f"must be >= {shown(least)} and <= {shown(most)}{of_most and f' ({of_most})'}"
    raise ConfigError(f"{option} {shown(value)} {rule}; try: {option} {shown(nearest)}")


def check_lengths(config: RunConfig, prompt: float | None, response: float | None) -> None:
    """Raise ConfigError for mean lengths of prompts and responses that a configuration does not allow."""
    data = config.data
    bounds = ((config.longest_sequence, "data.max_length"),) * 2
    if config.generates:
        bounds = (
            (data.max_prompt_length, "data.max_prompt_length"),
            (data.max_response_length, "data.max_response_length"),
        )
    for option, value, bound in zip(("--prompt-length", "--response-length"), (prompt, response), bounds, strict=True):
        check_number(option, value, 1, *bound)
