"""The average of several models' weights, tensor by tensor: one process, no GPU.

The sum of weight * tensor is computed in float64 and rounded once, to the dtype of the first model, so a tensor that
all models share is unchanged. Memory holds one file of the result, one tensor in float64 and one as read; with experts,
one layer's experts of every checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megatron_rl.checkpoint.export_saved import StoredModel, saved_model, write_model
from megatron_rl.checkpoint.folders import find
from megatron_rl.checkpoint.hf_import import is_finite
from megatron_rl.checkpoint.identity import computed_settings
from megatron_rl.checkpoint.manifest import MANIFEST, model_identity
from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.checkpoint.output_paths import refuse_target
from megatron_rl.checkpoint.pass_through import DTYPES
from megatron_rl.checkpoint.resume import usable_checkpoint
from megatron_rl.checkpoint.storage import writing
from megatron_rl.checkpoint.weight_files import odd_files, read_weight_files, type_faults
from megatron_rl.config.file_kinds import NOTHING, kind_of
from megatron_rl.config.json_files import UnreadableFileError, read_json
from megatron_rl.errors import ConfigError

FILE = "average.json"
"""The file in a written folder that lists the averaged checkpoints."""


@dataclass(frozen=True)
class Averaging:
    """One request to average. folders: checkpoints and Hugging Face folders in their order. shares: add up to 1."""

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
        """Write the average to the target. Raises as `write_average`."""
        models = [
            saved_model(folder, self.role) if (folder / MANIFEST).exists() else folder_model(folder)
            for folder in self.folders
        ]
        write_average(models, self.shares, [str(folder) for folder in self.folders], self.target)

    def lines(self) -> list[str]:
        """Lines that say where the average was written and what it is made of."""
        parts = [f"  {share:.4f} of {folder}" for folder, share in zip(self.folders, self.shares, strict=True)]
        return [f"{self.role} written to {self.target}, the average of", *parts]


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
            raise ConfigError(f"--role {role}: {folder} has none, as its run trained none; try: --role actor")
    return folders


def _shares(number: int, weights: str | None, ema: float | None) -> list[float]:
    if weights is not None and ema is not None:
        raise ConfigError("--weights and --ema both set the weights of the checkpoints; leave one of them out")
    if ema is not None:
        if not 0 < ema < 1:
            raise ConfigError(f"--ema {ema:g} must be > 0 and < 1; try: --ema 0.9")
        return moving(number, ema)
    if weights is None:
        return uniform(number)
    try:
        numbers = [float(part) for part in weights.split(",")]
    except ValueError as error:
        rule = "must be numbers with commas between them"
        raise ConfigError(f"--weights {weights} {rule}; try: --weights {','.join(['1'] * number)}") from error
    return shares_of(numbers, number)


def uniform(number: int) -> list[float]:
    """Equal shares of `number` models."""
    return [1 / number] * number


def moving(number: int, decay: float) -> list[float]:
    """Share of each of `number` models in an exponential moving average, in their order.

    average = decay * average + (1 - decay) * model, from the first model on.
    """
    return [decay ** (number - 1), *((1 - decay) * decay ** (number - 1 - place) for place in range(1, number))]


def shares_of(weights: Sequence[float], number: int) -> list[float]:
    """Scale weights so that they add up to 1. Raises ConfigError."""
    if len(weights) != number:
        raise ConfigError(f"--weights has {len(weights)} numbers, which must be one for each of {number} checkpoints")
    largest = max(weights, default=0.0)
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not largest > 0:
        given = ",".join(f"{weight:g}" for weight in weights)
        nearest = ",".join("1" for _ in weights)
        raise ConfigError(f"--weights {given} must be finite, >= 0 and not all 0; try: --weights {nearest}")
    parts = [weight / largest for weight in weights]  # their sum is finite, whatever the weights are
    return [part / sum(parts) for part in parts]


def folder_model(folder: Path) -> StoredModel:
    """Open a Hugging Face folder of safetensors. Raises ConfigError if its weights cannot be read."""
    try:
        odd = odd_files(folder)
    except OSError as error:
        odd = [f"it cannot be read: {error.strerror}"]
    tensors, faults = ({}, odd) if odd else read_weight_files(folder)
    faults = faults or type_faults(tensors)
    if faults or not tensors:
        raise ConfigError(f"{folder} cannot be averaged: {'; '.join(faults) or 'it has no weights'}")
    try:
        for file in sorted(folder.glob("*.json")):
            read_json(file)
        settings = ModelFolder(folder).hf_config
    except (UnreadableFileError, ConfigError, OSError) as error:
        raise ConfigError(f"{folder} cannot be averaged: {error!s:.500}") from error

    def read(name: str) -> torch.Tensor:
        with safe_open(tensors[name].file, "pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    dtypes = {name: DTYPES[tensor.dtype] for name, tensor in tensors.items()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    files = {name: tensor.file.name for name, tensor in tensors.items()}
    return StoredModel(folder, settings.architectures[0], shapes, dtypes, read, files)


def first_difference(first: StoredModel, other: StoredModel) -> str | None:
    """The reason why two models cannot be averaged, in a sentence about the second; None if they can."""
    ours, theirs = (_settings(model) for model in (first, other))
    for name in ours:
        if ours[name] != theirs[name]:
            return f"its {name} is {theirs[name]}, not {ours[name]}"
    for name in first.shapes:
        if name not in other.shapes:
            return f"it has no tensor {name}"
        if first.shapes[name] != other.shapes[name]:
            return f"its {name} has shape {list(other.shapes[name])}, not {list(first.shapes[name])}"
    for name in other.shapes:
        if name not in first.shapes:
            return f"it has a tensor {name} more"
    ours, theirs = (_tokens(model.source) for model in (first, other))
    differ = [token for token, number in ours.items() if theirs.get(token, number) != number]
    return f"its tokenizer has {differ[0]!r} as {theirs[differ[0]]}, not {ours[differ[0]]}" if differ else None


def _tokens(folder: Path) -> dict[str, int]:
    """Token -> its number; {} if there is no tokenizer to read."""
    try:
        vocabulary: dict[str, int] = ModelFolder(folder).tokenizer.get_vocab()
        return vocabulary
    except (UnreadableFileError, ConfigError):
        return {}


def _settings(model: StoredModel) -> dict[str, Any]:
    settings = ModelFolder(model.source).language_config.to_dict()
    settings["architectures"] = [model.architecture]
    return model_identity(settings) | computed_settings(settings)


def averaged(models: Sequence[StoredModel], shares: Sequence[float], names: Sequence[str]) -> StoredModel:
    """The sum of share * model, with config and tokenizer of the first. names: of the models, for messages.

    Raises ConfigError with the first difference between two models. Reading a tensor raises ConfigError if an element
    is NaN or infinite.
    """
    for model, name in zip(models[1:], names[1:], strict=True):
        difference = first_difference(models[0], model)
        if difference is not None:
            raise ConfigError(f"{name} is another model than {names[0]}: {difference}; only one model can be averaged")

    def read(tensor: str) -> torch.Tensor:
        total = torch.zeros(models[0].shapes[tensor], dtype=torch.float64)
        for model, share, name in zip(models, shares, names, strict=True):
            if share:
                part = model.read(tensor)
                if not is_finite(part):
                    place = f"{tensor} in {model.files[tensor]}" if tensor in model.files else tensor
                    raise ConfigError(f"{name} cannot be averaged: an element of {place} is NaN or infinite")
                total.add_(part, alpha=share)
        return total.to(models[0].dtypes[tensor])

    return replace(models[0], read=read)


def write_average(models: Sequence[StoredModel], shares: Sequence[float], names: Sequence[str], target: Path) -> None:
    """Write the average as a Hugging Face folder, with `average.json`, which lists the models and their shares.

    Raises ConfigError as `averaged`, StorageError if the folder cannot be written.
    """
    write_model(averaged(models, shares, names), target)
    made_of = [{"checkpoint": name, "share": share} for name, share in zip(names, shares, strict=True)]
    with writing():
        (target / FILE).write_text(json.dumps(made_of, indent=1) + "\n")
