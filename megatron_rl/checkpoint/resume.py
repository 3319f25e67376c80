"""Choose the checkpoint that a run resumes, before any process is started. Needs neither torch nor Megatron.

A folder is usable when it is complete, of this format, of the configured models, unchanged since it was written, and
when its pickles are harmless.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_rl.checkpoint.adapter_folder import LORA, REFERENCE_ADAPTER, adapter_differences, reference_differences
from megatron_rl.checkpoint.contents import contents_faults
from megatron_rl.checkpoint.folders import HF_MODEL, LEFTOVERS, NAME, find
from megatron_rl.checkpoint.identity import compared
from megatron_rl.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    ManifestError,
    OtherFormatError,
    broken_files,
    read_manifest,
)
from megatron_rl.checkpoint.pickles import forbidden_globals, pickles_in
from megatron_rl.config.megatron import ADAM
from megatron_rl.config.problems import nearest_name, nearest_number, refused
from megatron_rl.config.trainer import TrainerConfig
from megatron_rl.errors import ConfigError, Violation
from megatron_rl.observe.loggers import METRICS_FILE

OPTIMIZER, TOWER, FROZEN = "optimizer", "vision tower", "frozen"
DEFAULTS = {OPTIMIZER: ADAM, TOWER: FROZEN}
"""Facts of a role's training that an identity has only where they are others."""
Models = Mapping[str, dict[str, Any]]
"""Role -> `model_identity` of its configured model."""


@dataclass(frozen=True)
class ResumePoint:
    """The start of a run: after `step`, with the state in `path`; None and 0 for a new run.

    skipped: newer folders that cannot be used, each with the reason, to be shown to the user.
    """

    path: Path | None
    step: int
    skipped: tuple[str, ...] = ()


class UnfitError(Exception):
    """A complete checkpoint that must not be loaded by this run; the message is the reason."""


def select(trainer: TrainerConfig, models: Models, checksums: bool = True) -> ResumePoint:
    """The checkpoint that `trainer.resume_mode` asks for.

    auto skips what is torn or damaged, and raises ConfigError for a complete checkpoint of another model or format
    and where there are checkpoints but none is usable, because a fresh start would bury them; resume_path raises
    ConfigError for anything that is wrong. checksums: read every byte (it takes the time that loading takes),
    otherwise files are only compared by size.
    """
    if trainer.resume_mode == "disable":
        return ResumePoint(None, 0)
    at_path = trainer.resume_mode == "resume_path"
    key = "trainer.resume_from_path" if at_path else "trainer.default_local_dir"
    given = trainer.resume_from_path or "" if at_path else trainer.default_local_dir
    try:
        return _at_path(given, models, checksums) if at_path else _newest(Path(given), models, checksums)
    except OSError as error:
        raise refused(Violation({key: given}, f"must be a folder that can be read: {error.strerror}")) from error


def usable_checkpoint(given: Path) -> Path:
    """`given` itself, or of a run's folder the newest checkpoint, whole and harmless, of whatever model.

    Raises ConfigError with the reason where it is not.
    """
    try:
        inside = find(given)
    except OSError as error:
        raise ConfigError(f"{given} cannot be read: {error.strerror}") from error
    run = given.parent if NAME.fullmatch(given.name) and not given.exists() else given
    if _is_run(run) and not find(run):
        model = trained_model(run)
        hint = "" if model is None else f"; its trained model is {model}, a Hugging Face folder"
        raise ConfigError(f"{run} has no checkpoints, because its run has saved none (trainer.save_freq){hint}")
    folder = inside[0].path if inside else given
    if (reason := _why_no_checkpoint(folder)) is not None:
        raise ConfigError(reason)
    try:
        _check(folder, {}, checksums=True)
    except (ManifestError, UnfitError) as error:
        usable = _nearest_usable(folder, folder.parent, {})
        hint = f"{folder.parent} has no usable checkpoint" if usable is None else f"try: {usable}"
        raise ConfigError(f"{folder} is no checkpoint that can be used: {error}; {hint}") from error
    return folder


def _why_no_checkpoint(folder: Path) -> str | None:
    """Return the sentence on a path that nobody wrote as a checkpoint; None for what may be one, whole or not."""
    if not folder.exists():
        others = [str(other) for other in folder.parent.iterdir()] if folder.parent.is_dir() else []
        steps, asked = {one.step: one.path for one in find(folder.parent)}, NAME.fullmatch(folder.name)
        if asked and steps:
            return f"there is no folder {folder}; try: {steps[nearest_number(int(asked[1]), steps)]}"
        near = f"; did you mean: {nearest_name(str(folder), others)}" if others else ""
        return f"there is no folder {folder}{near}"
    if (folder / "config.json").is_file():
        return f"{folder} is a Hugging Face folder, and no checkpoint; nothing needs to be exported from it"
    if folder.is_dir() and not NAME.fullmatch(folder.name) and not (folder / MANIFEST).exists():
        return f"{folder} is neither a checkpoint (global_step_N) nor the folder of a run, which has {METRICS_FILE}"
    return None


def trained_model(run: Path) -> Path | None:
    """Return the folder of the model that a run has written at its end, if it has."""
    folder = run / HF_MODEL
    return folder if (folder / "config.json").is_file() else None


def _is_run(folder: Path) -> bool:
    """Return whether a folder looks like that of a run, with or without checkpoints."""
    return (folder / METRICS_FILE).is_file() or trained_model(folder) is not None


def _newest(root: Path, models: Models, checksums: bool) -> ResumePoint:
    skipped = []
    for found in find(root):
        try:
            _check(found.path, models, checksums)
        except (OtherFormatError, UnfitError) as error:
            raise _refused_auto(
                f"must resume from the newest checkpoint, and {found.path} cannot be resumed: {error}",
                "which sets it aside, or another trainer.default_local_dir",
            ) from error
        except ManifestError as error:
            skipped.append(f"{found.path}: {error}")
        else:
            return ResumePoint(found.path, found.step, tuple(skipped))
    if skipped:
        raise _refused_auto(
            f"must resume from a complete checkpoint, and trainer.default_local_dir={root} has none: "
            f"{'; '.join(skipped)}",
            "which sets them aside",
        )
    return ResumePoint(None, 0)


def _refused_auto(rule: str, hint: str) -> ConfigError:
    key = "trainer.resume_mode"
    return refused(Violation({key: "auto"}, rule, {key: "disable"}, hint))


def _at_path(given: str, models: Models, checksums: bool) -> ResumePoint:
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise _refused_path(given, "must be a checkpoint folder, and it does not exist", folder, folder.parent, models)
    if find(folder):
        rule = "must be a checkpoint folder, and it is the folder of a run"
        raise _refused_path(given, rule, folder, folder, models)
    try:
        if folder.name.endswith(LEFTOVERS):
            raise ManifestError("by its name it is a leftover of a killed run")
        step = _check(folder, models, checksums).step
    except (ManifestError, UnfitError) as error:
        raise _refused_path(given, f"cannot be resumed: {error}", folder, folder.parent, models) from error
    return ResumePoint(folder, step)


def _refused_path(given: str, rule: str, folder: Path, root: Path, models: Models) -> ConfigError:
    """The error, with the nearest usable checkpoint in `root`, else with a folder of similar name or a fresh start."""
    key = "trainer.resume_from_path"
    usable = _nearest_usable(folder, root, models)
    if usable is not None:
        return refused(Violation({key: given}, rule, {key: str(usable)}))
    hint = f"{root} has no usable checkpoint"
    neighbours = [str(other) for other in root.iterdir() if other.is_dir()] if root.is_dir() else []
    if neighbours and not folder.exists():
        hint += f"; did you mean: {nearest_name(str(folder), neighbours)}"
    return refused(Violation({key: given}, rule, {"trainer.resume_mode": "auto", key: None}, hint))


def _check(folder: Path, models: Models, checksums: bool) -> Manifest:
    """The manifest of a usable folder. Raises ManifestError when it is damaged, UnfitError when it does not belong."""
    try:
        return _checked(folder, models, checksums)
    except OSError as error:
        raise ManifestError(f"it cannot be read: {error}") from error


def _checked(folder: Path, models: Models, checksums: bool) -> Manifest:
    manifest = read_manifest(folder)
    named = NAME.fullmatch(folder.name)
    if named and int(named[1]) != manifest.step:
        raise ManifestError(f"its manifest is of step {manifest.step}")
    differences = _differences(manifest, models)
    if differences:
        raise UnfitError(f"it is of another model: {'; '.join(differences)}")
    faults = broken_files(folder, manifest, checksums) or contents_faults(folder, manifest)
    if faults:
        raise ManifestError("; ".join(faults))
    above = sorted({parent for name in manifest.files for parent in PurePosixPath(name).parents})
    links = [str(parent) for parent in above if parent.name and (folder / parent).is_symlink()]
    if links:
        raise UnfitError(f"links to folders are not followed: {', '.join(links)}")
    for file in pickles_in(folder):
        listed = file.relative_to(folder).as_posix() in manifest.files  # others are somebody's own, and never loaded
        names = forbidden_globals(file) if listed else set()
        if names:
            listing = ", ".join(sorted(names))
            raise UnfitError(f"loading {file.relative_to(folder)} could run any code, because it names {listing}")
    return manifest


def _differences(manifest: Manifest, models: Models) -> list[str]:
    differences = []
    for role, identity in models.items():
        saved = manifest.models.get(role)
        if saved is None:
            differences.append(f"it has no {role}, but {', '.join(manifest.models)}")
            continue
        differences += adapter_differences(role, saved.get(LORA), identity.get(LORA))
        differences += reference_differences(role, saved, identity)
        for name, default in DEFAULTS.items():
            before, now = (facts.get(name, default) for facts in (saved, identity))
            if before != now:
                differences.append(f"{name} of the {role} is {before}, and configured is {now}")
        for name, value in compared(identity, saved).items():
            if name not in (LORA, REFERENCE_ADAPTER, *DEFAULTS) and saved.get(name) != value:
                differences.append(f"{name} of the {role} is {saved.get(name)}, and configured is {value}")
    return differences


def _nearest_usable(folder: Path, root: Path, models: Models) -> Path | None:
    """The newest usable checkpoint in `root` other than `folder`."""
    for found in find(root):
        if found.path.resolve() == folder.resolve():
            continue
        try:
            _check(found.path, models, checksums=False)
        except (ManifestError, UnfitError):
            continue
        return found.path
    return None
