"""Check paths that a user asks to write to: outside of checkpoints, with a name that the file system accepts.

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
    """Find the checkpoint that a path is or is in, links followed; None outside of all checkpoints.

    The path need not exist. A file written there would be no part of the checkpoint, and would be deleted with it.
    """
    try:
        whole = path.expanduser().resolve()
        return next((folder for folder in (whole, *whole.parents) if is_checkpoint(folder)), None)
    except (OSError, RuntimeError):
        return None  # a loop of links, an unknown user's home folder, or too long a name: other rules refuse it


def refuse_in_checkpoint(name: str, path: Path) -> None:
    """Raise ConfigError if `path`, given by option `name` to write to, is in a checkpoint."""
    folder = checkpoint_round(path)
    if folder is not None:
        raise ConfigError(
            f"{name} {path} must not be inside of a checkpoint, {folder}; try: {name} {path_outside(folder, path)}"
        )


def path_outside(checkpoint: Path, path: Path) -> Path:
    """A path outside of a checkpoint, named after one in it."""
    name = path.name if path.resolve() != checkpoint else "new"
    return checkpoint.with_name(f"{checkpoint.name}-{name}")


def refuse_target(target: Path, nearest: Path) -> None:
    """Raise ConfigError if a model folder to write exists, cannot be made, or is in a checkpoint."""
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
        raise ConfigError(f"{option} must not exist, and it is {kind}; try: --target {nearest}")
    above = next(parent for parent in folder.parents if kind_of(parent) != NOTHING)
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        reason = "is no folder" if not above.is_dir() else "cannot be written"
        raise ConfigError(f"{option} must be a folder that can be made, and {above} {reason}")
