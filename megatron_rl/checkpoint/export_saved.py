"""Export a saved role as a Hugging Face folder: one process, no GPU, one file of weights in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from megatron_rl.checkpoint.adapter_weights import SavedAdapters, holds_adapters
from megatron_rl.checkpoint.constants import read_constants
from megatron_rl.checkpoint.contents import RUN_FILE
from megatron_rl.checkpoint.folders import HF_FOLDER
from megatron_rl.checkpoint.hf_folder import Description, removing_unfinished, write_hf_folder
from megatron_rl.checkpoint.hf_tensors import HFTensor, hf_tensors
from megatron_rl.checkpoint.model_folder import ModelFolder, form_of_images
from megatron_rl.checkpoint.pass_through import PassThroughTensors, kept_carried
from megatron_rl.checkpoint.run_file import read_run_file, reads_images
from megatron_rl.checkpoint.saved_tensors import BIAS, OPTIMIZER_PREFIX, SavedTensors, checkpoint_key
from megatron_rl.checkpoint.score_statistics import saved_statistics, write_statistics
from megatron_rl.checkpoint.storage import writing
from megatron_rl.errors import StorageError
from megatron_rl.model.families import Model, ParamSpec, classifier_map, mtp_specs


@dataclass(frozen=True)
class StoredModel:
    """A model on disk, seen as the tensors of a Hugging Face folder.

    source: the folder of its config.json and tokenizer. shapes, dtypes: by name, in the order of the files. read:
    returns a tensor by its name. files: tensor -> its file, for messages; may be empty.
    """

    source: Path
    architecture: str
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    read: Callable[[str], torch.Tensor]
    files: Mapping[str, str] = field(default_factory=dict)


def saved_model(checkpoint: Path, role: str, base: Path | None = None) -> StoredModel:
    """Open the actor's model, or the critic as a reward model, of a complete checkpoint.

    A vision tower is the checkpoint's where it was trained. Adapters are merged into their base, and pass-through
    tensors are read from it: from `base`, or from the folder that the run started from. Raises ConfigError if that does
    not exist, or if the checkpoint needs none and `base` is given.
    """
    source = checkpoint / role / HF_FOLDER
    folder, saved = ModelFolder(source), SavedTensors(checkpoint / role)
    model = Model.of(folder.language_config.to_dict())
    is_critic = role == "critic"
    with_mtp = replace(model, has_mtp=model.family.carried.mtp is not None and not is_critic)
    if any(checkpoint_key(spec, 0) in saved.names for spec in mtp_specs(with_mtp).values()):
        model = with_mtp
    specs = model.value_specs if is_critic else model.specs | _trained_tower(folder, saved)
    kept = PassThroughTensors()
    if not is_critic or reads_images(checkpoint):
        kept = kept_carried(source, base)
    with_tower = is_critic and bool(kept.stored)
    own = classifier_map(model.family, model.shape, with_tower) if is_critic else specs
    names = [tensor.name for tensor in hf_tensors(own)]
    tensors = dict(zip(names, hf_tensors(specs), strict=True))
    dtype = saved.dtype(saved.weights[0])
    read_tensor: Callable[[HFTensor], torch.Tensor] = partial(_read, saved)
    carried = kept.without(tensors)
    if holds_adapters(saved) or (base is not None and not kept.stored):
        adapters = SavedAdapters.open(checkpoint, role, base)
        read_tensor = adapters.merged
    constants = read_constants(model.constants.values(), source, torch.device("cpu"), dtype=None)
    biases = {name: f"{OPTIMIZER_PREFIX}{BIAS}.{name}" for name in constants}
    if set(biases.values()) <= set(saved.names):
        constants = {name: saved.read([key])[key] for name, key in biases.items()}

    def read(name: str) -> torch.Tensor:
        if name in carried.stored:
            return carried.read(name)
        return constants[name] if name in constants else read_tensor(tensors[name])

    return StoredModel(
        source,
        model.family.classifier(with_tower).reward_architecture if is_critic else model.family.architecture,
        {name: tensor.shape for name, tensor in tensors.items()}
        | {name: tuple(tensor.shape) for name, tensor in constants.items()}
        | carried.shapes,
        dict.fromkeys(tensors, dtype) | {name: tensor.dtype for name, tensor in constants.items()} | carried.dtypes,
        read,
    )


def _trained_tower(folder: ModelFolder, saved: SavedTensors) -> dict[str, ParamSpec]:
    """Return specs of a vision tower that a checkpoint has; {}: it was not trained."""
    form = form_of_images(folder)
    specs = {} if form is None else form.tower_specs
    return {name: spec for name, spec in specs.items() if checkpoint_key(spec, 0) in saved.names}


def _read(saved: SavedTensors, tensor: HFTensor) -> torch.Tensor:
    whole = saved.kept(checkpoint_key(tensor.spec, tensor.segment))
    return tensor.as_in_folder(whole if tensor.expert is None else whole[tensor.expert].clone())


def export_saved(checkpoint: Path, role: str, target: Path, base: Path | None = None) -> None:
    """Write the actor's language model, or the critic as a reward model, of a complete checkpoint to `target`.

    The tensors keep the dtype they were trained in, and carried ones their own. A reward model gets the statistics of
    its held-out scores. An existing `target` is replaced. base: as of `saved_model`. Raises ConfigError as that does,
    StorageError if it cannot be written, and then nothing of it is left.
    """
    run = checkpoint / RUN_FILE
    statistics = saved_statistics(read_run_file(run)["run"]) if role == "critic" and run.exists() else None
    write_model(saved_model(checkpoint, role, base), target)
    if statistics is not None:
        with writing():
            write_statistics(target, statistics)


def export_saved_adapter(checkpoint: Path, role: str, target: Path, base: Path | None = None) -> None:
    """Write the adapters of a complete checkpoint to `target`, as PEFT's folder, which names `base`.

    base: None: the folder that the run started from. Raises ConfigError if it holds none, StorageError as
    `export_saved`.
    """
    adapters = SavedAdapters.open(checkpoint, role, base)
    with storing_folder(target):
        adapters.write(target)


def write_model(model: StoredModel, target: Path) -> None:
    """Write a model as a Hugging Face folder in place of `target`; its config names the dtype of the first tensor.

    Raises StorageError where that fails, and then nothing of it is left.
    """
    sizes = {name: math.prod(shape) * model.dtypes[name].itemsize for name, shape in model.shapes.items()}
    description = Description(model.source, model.architecture, next(iter(model.dtypes.values())))
    with storing_folder(target):
        write_hf_folder(target, sizes, model.read, description)


@contextmanager
def storing_folder(target: Path) -> Iterator[None]:
    """Raise StorageError if the body cannot write to `target`, and leave nothing of it."""
    with removing_unfinished(target):
        try:
            with writing(target):
                yield
        except StorageError as error:
            raise StorageError(f"{target} could not be written: {error}") from error
