"""YAML that people write: text is checked for its depth before it is read, because libyaml's recursion has no end."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_rl.errors import ConfigError

MOST_LEVELS = 50
"""OmegaConf needs ten frames of Python's stack for each."""
YAML_PROBLEMS = (yaml.YAMLError, OmegaConfBaseException, ValueError)
"""Errors of reading YAML, `refuse_depth` included."""
PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def refuse_depth(text: str) -> None:
    """Raises ValueError where lists and groups are nested more than MOST_LEVELS deep, YAMLError for other text."""
    level = 0
    for event in yaml.parse(text, Loader=PARSER):
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if level > MOST_LEVELS:
            raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep")


def read_yaml(file: Path, is_resolved: bool = False) -> Any:
    """The content of a file. is_resolved: with interpolations put in, where all can be. Raises ConfigError."""
    try:
        text = file.read_text("utf-8")
        refuse_depth(text)
        loaded = OmegaConf.load(io.StringIO(text))
        if is_resolved:
            with contextlib.suppress(OmegaConfBaseException):
                return OmegaConf.to_container(loaded, resolve=True)
        return OmegaConf.to_container(loaded, resolve=False)
    except YAML_PROBLEMS as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
