"""What is averaged, as a user names it: checkpoints, runs and Hugging Face folders, with what each counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.checkpoint.average import folder_model, moving, shares_of, uniform, write_average
from megatron_rl.checkpoint.export_saved import StoredModel, saved_model
from megatron_rl.checkpoint.folders import find
from megatron_rl.checkpoint.manifest import MANIFEST
from megatron_rl.checkpoint.resume import usable_checkpoint
from megatron_rl.checkpoint.targets import refuse_target
from megatron_rl.config.file_kinds import NOTHING, kind_of
from megatron_rl.errors import ConfigError


@dataclass(frozen=True)
class Averaging:
    """folders: checkpoints and Hugging Face folders in their order. shares: what each counts, 1 in all."""

    folders: list[Path]
    shares: list[float]
    role: str
    target: Path

    @classmethod
    def of(cls, given: Sequence[Path], weights: str | None, ema: float | None, role: str, target: Path) -> Averaging:
        """weights: numbers with commas between them; ema: a decay; both None: all count the same.

        Raises ConfigError for what cannot be averaged or read.
        """
        refuse_target(target, nearest=Path(f"{target}-average"))
        folders = [folder for one in given for folder in _models_in(one, role)]
        if len(folders) < 2:
            raise ConfigError(
                f"--checkpoints must be at least 2 checkpoints, and {', '.join(map(str, given))} is {len(folders)}"
            )
        return cls(folders, _shares(len(folders), weights, ema), role, target)

    def write(self) -> None:
        """Raises ConfigError where these are different models, StorageError where the target cannot be written."""
        models = [self._model(folder) for folder in self.folders]
        write_average(models, self.shares, [str(folder) for folder in self.folders], self.target)

    def lines(self) -> list[str]:
        """What was made of what."""
        parts = [f"  {share:.4f} of {folder}" for folder, share in zip(self.folders, self.shares, strict=True)]
        return [f"{self.role} written to {self.target}, the average of", *parts]

    def _model(self, folder: Path) -> StoredModel:
        return saved_model(folder, self.role) if _is_checkpoint(folder) else folder_model(folder)


def _is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).exists()


def _models_in(given: Path, role: str) -> list[Path]:
    """Checkpoints of a run's folder from the first to the last, a checkpoint, or a Hugging Face folder."""
    if kind_of(given / "config.json") != NOTHING:
        return [given]
    try:
        inside = sorted(find(given), key=lambda one: one.step)
    except OSError as error:
        raise ConfigError(f"--checkpoints {given} cannot be read: {error.strerror}") from error
    folders = [usable_checkpoint(folder) for folder in ([one.path for one in inside] or [given])]
    for folder in folders:
        if not (folder / role).is_dir():
            raise ConfigError(f"--role {role}: {folder} has none, as its run trained none; nearest: --role actor")
    return folders


def _shares(number: int, weights: str | None, ema: float | None) -> list[float]:
    if weights is not None and ema is not None:
        raise ConfigError("--weights and --ema both say what each checkpoint counts; leave one of them out")
    if ema is not None:
        if not 0 < ema < 1:
            raise ConfigError(f"--ema {ema:g} must be > 0 and < 1; nearest: --ema 0.9")
        return moving(number, ema)
    if weights is None:
        return uniform(number)
    try:
        numbers = [float(part) for part in weights.split(",")]
    except ValueError as error:
        rule = "must be numbers with commas between them"
        raise ConfigError(f"--weights {weights} {rule}; nearest: --weights {','.join(['1'] * number)}") from error
    return shares_of(numbers, number)
