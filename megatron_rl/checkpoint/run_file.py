"""Read run.json, the controller's part of a checkpoint; a file that was edited gives ConfigError, not a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.records import RoleState

KNOWN = {field.name for field in fields(RoleState)}
NEEDED = {field.name for field in fields(RoleState) if field.default is MISSING}
"""Names of a role's numbers; checkpoints of older versions do not have those with defaults."""


def read_run_file(file: Path) -> dict[str, Any]:
    """The content: "run", "roles" (role -> numbers of its RoleState) and "config". Raises ConfigError for another."""
    with reading(file):
        content: dict[str, Any] = json.loads(file.read_text())
        if not all(isinstance(content[name], dict) for name in ("run", "roles", "config")):
            raise TypeError("run, roles and config must be objects in braces")
        for role, state in content["roles"].items():
            if not NEEDED <= state.keys() <= KNOWN or not _are_counts(state.values()):
                raise TypeError(f"the numbers of the {role} are {state}")
    return content


def reads_images(checkpoint: Path) -> bool:
    """Whether the run of a checkpoint reads images; False for weights without the file of their run.

    Raises ConfigError as `read_run_file`.
    """
    file = checkpoint / "run.json"
    return file.is_file() and read_run_file(file)["config"].get("data", {}).get("image_key") is not None


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Raise ConfigError if the body finds values in run.json that a run does not write."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; {_way_out()}") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error!s:.200}"
        raise ConfigError(f"{file} does not have the form that a run writes: {reason}; {_way_out()}") from error


def _are_counts(values: Iterable[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _way_out() -> str:
    return "take another checkpoint (trainer.resume_mode=resume_path), or start over (trainer.resume_mode=disable)"
