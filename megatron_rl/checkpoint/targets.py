"""Where a user may have something written: not in a checkpoint, and under a name that the file system takes.

Needs neither torch nor Megatron.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatron_rl.checkpoint.folders import UNFINISHED
from megatron_rl.checkpoint.manifest import is_checkpoint
from megatron_rl.config.file_kinds import NOTHING, kind_of
from megatron_rl.errors import ConfigError

LONGEST_INSIDE = len("/model-00001-of-00001.safetensors")
"""Characters of the longest path in a model folder."""


def checkpoint_round(path: Path) -> Path | None:
    """Find the checkpoint that a path is or lies in, links followed; None for a path outside of all checkpoints.

    The path need not exist.

    A file written there would be no part of the checkpoint, and would be deleted with it.
    """
    try:
        whole = path.expanduser().resolve()
        return next((folder for folder in (whole, *whole.parents) if is_checkpoint(folder)), None)
    except (OSError, RuntimeError):
        return None  # a loop of links, an unknown user's home folder, or too long a name: other rules refuse it


def refuse_in_checkpoint(name: str, path: Path) -> None:
    """For what is to be written to a path that `name`, an option, gives. Raises ConfigError within a checkpoint."""
    folder = checkpoint_round(path)
    if folder is not None:
        raise ConfigError(
            f"{name} {path} must not lie in a checkpoint, {folder}; nearest: {name} {beside(folder, path)}"
        )


def beside(checkpoint: Path, path: Path) -> Path:
    """A path like one in a checkpoint, and outside of it."""
    name = path.name if path.resolve() != checkpoint else "new"
    return checkpoint.with_name(f"{checkpoint.name}-{name}")


def refuse_target(target: Path, nearest: Path) -> None:
    """For a model folder to write. Raises ConfigError where it is there, cannot be made, or lies in a checkpoint."""
    option = f"--target {target}"
    shown = option if len(option) <= 120 else f"{option[:120]}..."
    folder = target.expanduser().absolute()
    room = (len(UNFINISHED), len(UNFINISHED) + LONGEST_INSIDE + 1)
    limits = [os.pathconf("/", name) - less for name, less in zip(("PC_NAME_MAX", "PC_PATH_MAX"), room, strict=True)]
    sizes = (max(len(os.fsencode(part)) for part in folder.parts), len(os.fsencode(folder)))
    for size, limit, what in zip(sizes, limits, ("name", "path"), strict=True):
        if size > limit:
            raise ConfigError(f"{shown} must have a {what} of at most {limit} bytes, and it has {size}")
    refuse_in_checkpoint("--target", target)
    kind = kind_of(folder)
    if kind != NOTHING:
        raise ConfigError(f"{option} must not exist, and it is {kind}; nearest: --target {nearest}")
    above = next(parent for parent in folder.parents if kind_of(parent) != NOTHING)
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        reason = "is no folder" if not above.is_dir() else "cannot be written"
        raise ConfigError(f"{option} must be a folder that can be made, and {above} {reason}")
