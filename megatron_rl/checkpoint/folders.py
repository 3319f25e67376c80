"""The checkpoint folders of a run: find complete ones; commit, replace, rename and delete them.

    global_step_N               complete at every instant: renamed to this name when its manifest is on the disk
    global_step_N.unfinished    being written
    global_step_N.replaced      complete; counts as global_step_N while another one is about to take that name
    global_step_N.deleted       being deleted
    global_step_N.set_aside     complete or broken, of an abandoned run; `.set_aside.2` is the next one
    run.set_aside               other files of an earlier run, which a new one has found in its folder

Only one run at a time may write to a folder; it calls `sweep` before it writes the first one. Needs neither torch nor
Megatron.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.checkpoint.durable import sync, write_text
from megatron_rl.checkpoint.manifest import MANIFEST, Manifest, ManifestError, broken_files, write_manifest
from megatron_rl.errors import ConfigError
from megatron_rl.observe.appended_file import opened_to_append

LATEST = "latest_checkpointed_iteration.txt"
"""verl's file next to the folders: the step of the newest checkpoint, as a number."""
LOCK = ".lock"
"""The file that a running process holds; the operating system lets go of it however the process ends."""
HF_FOLDER = "huggingface"
"""Where a role's part of a checkpoint keeps the configuration and the tokenizer of its model, as verl does."""
HF_MODEL = "hf_model"
"""Where a run's folder has the trained model at its end, as a Hugging Face folder."""
UNFINISHED, REPLACED, DELETED, SET_ASIDE = ".unfinished", ".replaced", ".deleted", ".set_aside"
LEFTOVERS = (UNFINISHED, REPLACED, DELETED)
"""Endings of names that only a killed run leaves behind."""
NAME = re.compile(r"global_step_(0|[1-9][0-9]*)(\.unfinished|\.replaced|\.deleted)?")


@dataclass(frozen=True)
class StepFolder:
    """A folder whose name says that it holds the checkpoint of a step; its manifest decides whether it is usable."""

    step: int
    path: Path


class FolderLock:
    """A run's claim to its folder: held until it is closed, or the process ends."""

    def __init__(self, root: Path) -> None:
        """Raises ConfigError if another run is in the folder: each would use the other's checkpoints as its own."""
        self.root = root
        self._file = opened_to_append(root / LOCK)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(
                f"trainer.default_local_dir={root} must be one run's, and another run is writing to it; try: {root}-2"
            ) from None

    def hold_again(self) -> bool:
        """Make and claim the folder again if it was deleted or emptied; returns whether it was.

        Raises ConfigError if another run has claimed it since, OSError.
        """
        try:
            if os.path.samestat((self.root / LOCK).stat(), os.fstat(self._file.fileno())):
                return False
        except FileNotFoundError:
            self.root.resolve().mkdir(parents=True, exist_ok=True)  # it may be a link
        again = FolderLock(self.root)
        self.close()
        self._file = again._file
        return True

    def close(self) -> None:
        """Let other runs in."""
        self._file.close()


@contextmanager
def only_writer(root: Path) -> Iterator[FolderLock]:
    """Keep other runs out of a run's folder until this block, or the process, ends. Raises ConfigError, OSError."""
    lock = FolderLock(root)
    try:
        yield lock
    finally:
        lock.close()


def step_folder(root: Path, step: int) -> Path:
    """Path of the complete checkpoint of `step`."""
    return root / f"global_step_{step}"


def unfinished_folder(root: Path, step: int) -> Path:
    """Path where the checkpoint of `step` is written until it is complete."""
    return root / f"global_step_{step}{UNFINISHED}"


def find(root: Path) -> list[StepFolder]:
    """The checkpoints of a run, newest first; none where there is no such folder. Raises OSError."""
    named = _named(root)
    paths = {step: path for path, step, suffix in named if suffix == REPLACED}
    paths |= {step: path for path, step, suffix in named if not suffix}
    return [StepFolder(step, paths[step]) for step in sorted(paths, reverse=True)]


def commit(unfinished: Path, manifest: Manifest) -> Path:
    """Make a written folder the complete checkpoint of its step, in place of an earlier one; returns its new path.

    Every file must be there and on the disk (`digest_files`). At each instant either the earlier or the new one is
    found. Raises ManifestError when bytes are missing in a file, OSError.
    """
    root, complete = unfinished.parent, step_folder(unfinished.parent, manifest.step)
    replaced = complete.with_name(complete.name + REPLACED)
    faults = broken_files(unfinished, manifest, checksums=False)
    if faults:
        raise ManifestError(f"{unfinished} cannot become a checkpoint: {'; '.join(faults)}")
    write_manifest(unfinished, manifest)
    if complete.exists():
        complete.rename(replaced)
    unfinished.rename(complete)
    sync(root)
    if replaced.exists():
        _delete(replaced)
    _write_latest(root, manifest.step)
    return complete


def remove_old(root: Path, keep: int | None, spared: int | None = None) -> list[Path]:
    """Delete all but the newest `keep` checkpoints (None: keep all) and that of step `spared`; returns their paths.

    Raises OSError.

    Folders without a manifest are not ours: they are neither counted nor touched.
    """
    ours = [found for found in find(root) if (found.path / MANIFEST).is_file()]
    old = [] if keep is None else [found.path for found in ours[keep:] if found.step != spared]
    for path in old:
        _delete(path)
    return old


def sweep(root: Path) -> list[Path]:
    """Delete unfinished folders of a killed run; returns their paths. Raises OSError.

    Also writes the number of the newest checkpoint, if the run was killed before it could.
    """
    folders = find(root)
    in_use = {one.path for one in folders}
    leftovers = sorted(path for path, _, suffix in _named(root) if suffix and path not in in_use)
    for path in leftovers:
        _delete(path)
    (root / (LATEST + UNFINISHED)).unlink(missing_ok=True)
    ours = [one.step for one in folders if (step_folder(root, one.step) / MANIFEST).is_file()]
    if ours and _read_latest(root) != str(ours[0]):
        _write_latest(root, ours[0])
    return leftovers


def set_aside(root: Path, after_step: int) -> list[tuple[Path, Path]]:
    """Rename every checkpoint later than `after_step`, so that a run that resumes there never uses it.

    Nothing is deleted or overwritten. Returns (old, new) paths, newest first. Raises OSError.
    """
    steps = [found.step for found in find(root)]
    # Before the folders: the number must not lead to one that has gone.
    if any(step > after_step for step in steps):
        _write_latest(root, max((step for step in steps if step <= after_step), default=None))
    renamed = []
    for found in find(root):
        if found.step > after_step:
            target = _unused(step_folder(root, found.step))
            found.path.rename(target)
            renamed.append((found.path, target))
    if renamed:
        sync(root)
    return renamed


def move_aside(root: Path, names: Sequence[str], name: str) -> Path:
    """Move files and folders of a run into a new folder `name`.set_aside there; returns it. Raises OSError."""
    target = _unused(root / name)
    target.mkdir()
    for one in names:
        (root / one).rename(target / one)
    sync(root)
    return target


def _named(root: Path) -> list[tuple[Path, int, str]]:
    """(path, step, suffix or "") of every folder of a checkpoint that is not set aside."""
    if not root.is_dir():
        return []
    matches = [(path, NAME.fullmatch(path.name)) for path in root.iterdir() if path.is_dir()]
    return [(path, int(match[1]), match[2] or "") for path, match in matches if match]


def _delete(folder: Path) -> None:
    """Delete a folder, renamed first: a kill in the middle must not leave a part of a checkpoint under a valid name."""
    if not folder.name.endswith((UNFINISHED, DELETED)):
        doomed = folder.with_name(folder.name.removesuffix(REPLACED) + DELETED)
        if doomed.exists():
            _delete(doomed)
        folder.rename(doomed)
        sync(folder.parent)
        folder = doomed
    if folder.is_symlink():
        folder.unlink()  # the target of a link is the user's own
    else:
        shutil.rmtree(folder)


def _read_latest(root: Path) -> str | None:
    return (root / LATEST).read_text().strip() if (root / LATEST).is_file() else None


def _write_latest(root: Path, step: int | None) -> None:
    if step is None:
        (root / LATEST).unlink(missing_ok=True)
    else:
        write_text(root / LATEST, str(step))


def _unused(folder: Path) -> Path:
    """The first unused name for setting a folder aside."""
    endings = (SET_ASIDE if number == 1 else f"{SET_ASIDE}.{number}" for number in itertools.count(1))
    targets = (folder.with_name(folder.name + ending) for ending in endings)
    return next(target for target in targets if not target.exists())
