"""Check that a checkpoint's manifest lists every file it must, and that each folder belongs to its role.

Hashes are right even if a manifest leaves files out or folders were swapped. So each role's folder names its role in a
file of its own, and the manifest must list every file that loading may read. Needs
neither torch nor Megatron.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_rl.checkpoint.folders import HF_FOLDER
from megatron_rl.checkpoint.manifest import Manifest
from megatron_rl.checkpoint.pickles import METADATA

RUN_FILE = "run.json"
"""The controller's part of a checkpoint."""
ROLE_FILE = "role.json"
"""In each role's folder: the role and the step that it was written for."""


LOADED, SUFFIXES = (METADATA, ROLE_FILE, "metadata.json"), (".distcp", ".pt")
"""Names, and endings of names, of files that megatron-core's loader reads in a role's folder."""


def reference_of(role: str) -> str:
    """Return the name, in checkpoints and copies, of a role's reference that has moved and is in another pool."""
    return f"{role}_reference"


def reference_beside(folder: Path) -> Path:
    """Return the folder of such a reference. folder: that of its policy in the same checkpoint."""
    return folder.with_name(reference_of(folder.name))


def write_role_file(folder: Path, role: str, step: int) -> None:
    """Mark `folder`/`role`, which exists, as this role's part of the checkpoint of `step`. Raises OSError."""
    (folder / role / ROLE_FILE).write_text(json.dumps({"role": role, "step": step}) + "\n")


def contents_faults(folder: Path, manifest: Manifest) -> list[str]:
    """Every reason why the manifest is not that of a whole checkpoint of its step. The files it lists must exist.

    Raises OSError.
    """
    if not manifest.models:
        return ["its manifest names no role"]
    needed = [RUN_FILE, *(f"{role}/{name}" for role in manifest.models for name in (ROLE_FILE, METADATA))]
    faults = [f"its manifest does not list {name}" for name in needed if name not in manifest.files]
    for path in sorted(folder.iterdir()):
        # Other folders are the user's, and are never read.
        if path.name not in manifest.models and (path / ROLE_FILE).exists():
            faults.append(f"its manifest names no role {path.name}, and there is such a folder")
    for role in manifest.models:
        if f"{role}/{ROLE_FILE}" in manifest.files:
            faults += _role_faults(folder, role, manifest.step)
        unlisted = sorted(_loaded_files(folder, role) - manifest.files.keys())
        faults += [f"its manifest does not list {name}" for name in unlisted]
    return list(dict.fromkeys(faults))


def _role_faults(folder: Path, role: str, step: int) -> list[str]:
    try:
        owner = json.loads((folder / role / ROLE_FILE).read_text())
    except (ValueError, RecursionError) as error:
        return [f"{role}/{ROLE_FILE} is not JSON: {error}"]
    expected = {"role": role, "step": step}
    return [] if owner == expected else [f"{role} was saved as {owner}, not as {expected}"]


def _loaded_files(folder: Path, role: str) -> set[str]:
    """The files of a role that loading may read: megatron-core's, and of the model's folder all but hidden ones.

    What else lies there, such as a system's files or a folder that somebody has put there, is not looked at.
    """
    within = folder / role
    beside = reference_beside(within)
    paths = [*within.iterdir(), *(beside.iterdir() if beside.is_dir() else ())]
    own = [path for path in paths if path.name in LOADED or path.match("__*") or path.suffix in SUFFIXES]
    model = [path for path in (within / HF_FOLDER).rglob("*") if not path.name.startswith(".") and not path.is_dir()]
    return {path.relative_to(folder).as_posix() for path in (*own, *model)}
