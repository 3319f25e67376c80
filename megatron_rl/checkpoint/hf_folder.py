"""Write a Hugging Face folder file by file, from one process or from many ranks; config and tokenizer come last.

A folder is written under a temporary name and renamed when it is complete, so that no reader sees half of one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, PretrainedConfig

from megatron_rl.checkpoint.model_folder import CONFIG, SCORE_AT_END, ModelFolder
from megatron_rl.checkpoint.pass_through import FILE as PASS_THROUGH
from megatron_rl.checkpoint.storage import free_space, storage_reason
from megatron_rl.checkpoint.weight_files import MODEL_FILES
from megatron_rl.errors import StorageError
from megatron_rl.model.families import REWARD_FAMILIES, family_of, inside_of

MAX_SHARD_BYTES = 1 << 30
"""A file of weights is no larger, unless one tensor is."""
QUANTIZATION = "quantization_config"
"""The config.json key of quantised weights."""
DTYPE_KEYS = ("dtype", "torch_dtype")
SECTIONS = ("mrope_section", "mrope_interleaved")
"""Settings of a rotary embedding that only places in images need."""


@dataclass(frozen=True)
class Description:
    """Config and tokenizer of an exported folder: those of `source`, with this architecture and dtype."""

    source: Path
    architecture: str
    dtype: torch.dtype


def was_quantised(source: Path) -> bool:
    """Whether a folder's config.json speaks of quantised weights, which an export of it does not hold."""
    return bool(ModelFolder(source).content.get(QUANTIZATION))


def plan_files(sizes: dict[str, int], max_shard_bytes: int = MAX_SHARD_BYTES) -> list[list[str]]:
    """Names of the tensors of each file, in the order of `sizes` (tensor -> bytes).

    A file is closed when the next tensor would make it larger than `max_shard_bytes`; one larger tensor is a file.
    """
    files: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not files or size > room:
            files.append([])
            room = max_shard_bytes
        files[-1].append(name)
        room -= size
    return files


def file_names(num_files: int) -> list[str]:
    """Names of weight files, as transformers has them: model.safetensors for one file, else numbered from 1."""
    if num_files == 1:
        return ["model.safetensors"]
    return [f"model-{number:05}-of-{num_files:05}.safetensors" for number in range(1, num_files + 1)]


@dataclass(frozen=True)
class ExportFile:
    """One file of weights: its tensors, the ranks that hold shards of each, and the rank that writes it."""

    name: str
    holders: dict[str, tuple[int, ...]]
    writer: int

    @property
    def tensors(self) -> list[str]:
        """Names in the order in which they are gathered."""
        return list(self.holders)

    @property
    def ranks(self) -> set[int]:
        """The ranks that take part in writing this file."""
        return {self.writer}.union(*self.holders.values())


def plan_export(sizes: dict[str, int], holders: dict[str, tuple[int, ...]], max_shard_bytes: int) -> list[ExportFile]:
    """Plan the files of an export: one by rank 0 if everything fits, else each stage's own, by its first rank.

    sizes: tensor -> bytes. holders: tensor -> the ranks of one stage that together hold it.
    """
    if sum(sizes.values()) <= max_shard_bytes:
        (only,) = file_names(1)
        return [ExportFile(only, holders, writer=0)]
    stages: dict[int, dict[str, int]] = {}
    for name, size in sizes.items():
        stages.setdefault(min(holders[name]), {})[name] = size
    groups = [(first, names) for first, stage in stages.items() for names in plan_files(stage, max_shard_bytes)]
    return [
        ExportFile(file, {name: holders[name] for name in names}, writer)
        for file, (writer, names) in zip(file_names(len(groups)), groups, strict=True)
    ]


def unfinished_folder(target: Path) -> Path:
    """Path where `target` is written until it is complete."""
    return target.with_name(target.name + ".unfinished")


@contextmanager
def removing_unfinished(target: Path) -> Iterator[None]:
    """If the body fails, delete what it has written of `target`, which may fill the disk."""
    try:
        yield
    except Exception:
        shutil.rmtree(unfinished_folder(target), ignore_errors=True)
        raise


def save_tensors(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write one file of weights; tensors must not share memory.

    Raises StorageError, with the bytes that were free before it.
    """
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    file.touch()
    mode = file.stat().st_mode  # by the umask, as of all files; safetensors makes its own for the owner alone
    room = free_space(file)
    try:
        save_file(contiguous, file, metadata={"format": "pt"})
    except Exception as error:  # safetensors' own class, which quotes the system; the partial file is gone by now
        reason = storage_reason(error)
        if reason is None:
            raise
        size = sum(tensor.nbytes for tensor in tensors.values())
        raise StorageError(f"{reason}; {room}, and {file.name} has {size:,}") from error
    file.chmod(mode)


def write_index(folder: Path, files: dict[str, list[str]], num_bytes: int) -> None:
    """Write the index of tensors to files, if there are several files. num_bytes: of all tensors."""
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def describe_model(folder: Path, files: Sequence[ExportFile], num_bytes: int, description: Description) -> None:
    """Write all but the weights of a model's folder. num_bytes: of all tensors."""
    write_index(folder, {file.name: file.tensors for file in files}, num_bytes)
    source = ModelFolder(description.source)
    is_classifier = description.architecture in REWARD_FAMILIES
    if inside_of([description.architecture]) is not None:
        copy_description(source, folder, description.dtype)
        if is_classifier:
            classifies(folder / CONFIG, description.architecture)
        source.write_generation_config(folder)
        return
    hf_config = deepcopy(classifier_config(source) if is_classifier else source.hf_config)
    hf_config.architectures = [description.architecture]
    hf_config.dtype = description.dtype
    if hasattr(hf_config, QUANTIZATION):
        delattr(hf_config, QUANTIZATION)  # weights are written as they are trained
    if is_classifier:
        hf_config.num_labels = 1
        setattr(hf_config, SCORE_AT_END, True)  # which transformers keeps and does not read
    hf_config.save_pretrained(folder)
    source.tokenizer.save_pretrained(folder)
    source.write_generation_config(folder)


def classifies(config: Path, architecture: str) -> None:
    """Let a config.json of a larger model name its classifier with one label, which has no head to tie."""
    content = json.loads(config.read_text())
    head = {"architectures": [architecture], "num_labels": 1, SCORE_AT_END: True}
    config.write_text(json.dumps(content | head, indent=2) + "\n")


def copy_description(source: ModelFolder, folder: Path, dtype: torch.dtype) -> None:
    """Copy all files of a model but its weights: config.json, with this dtype, tokenizer and processors.

    config.json is the file as it was if it names the dtype already, or none.
    """
    for file in sorted(source.path.iterdir()):
        if file.suffix in MODEL_FILES and not file.name.endswith(".index.json") and file.name != PASS_THROUGH:
            shutil.copyfile(file, folder / file.name)
    written = with_dtype(source.content, str(dtype).removeprefix("torch."))
    if written != source.content:
        (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")


def with_dtype(settings: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Replace the dtype that a config.json names for the whole model and for its language model."""
    inside = family_of(settings["architectures"]).inside
    own = {key: dtype for key in DTYPE_KEYS if settings.get(key) is not None}
    if inside is None or inside.key not in settings:
        return {**settings, **own}
    text = settings[inside.key]
    return {**settings, **own, inside.key: {**text, **{key: dtype for key in DTYPE_KEYS if text.get(key) is not None}}}


def classifier_config(source: ModelFolder) -> PretrainedConfig:
    """transformers' configuration of the classifier with the trunk of a folder's language model."""
    config = source.language_config
    family = family_of(config.architectures)
    if family.inside is None:
        return config
    settings = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures")}
    rope = settings.get("rope_parameters") or {}
    settings["rope_parameters"] = {key: value for key, value in rope.items() if key not in SECTIONS}
    classifier: PretrainedConfig = AutoConfig.for_model(family.text.model_type, **settings)
    return classifier


def write_files(
    target: Path,
    files: Sequence[ExportFile],
    gather: Callable[[ExportFile], dict[str, torch.Tensor]],
    describe: Callable[[Path], None],
    rank: int = 0,
    meet: Callable[[], object] = lambda: None,
) -> None:
    """Write a whole folder in place of `target`; all ranks that hold tensors must call, one file in memory at a time.

    gather: returns the whole tensors of a file on its writer; the file's ranks call it together. describe: writes all
    but the weights to a folder; rank 0 calls it. meet: a barrier of all ranks.
    """
    unfinished = unfinished_folder(target)
    if rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # left by an earlier attempt
        unfinished.mkdir(parents=True)
    meet()
    for file in files:
        if rank in file.ranks:
            tensors = gather(file)
            if rank == file.writer:
                save_tensors(tensors, unfinished / file.name)
            del tensors  # before the next file is gathered
    meet()
    if rank == 0:
        describe(unfinished)
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
    meet()


def write_hf_folder(
    target: Path,
    sizes: dict[str, int],
    read: Callable[[str], torch.Tensor],
    description: Description,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a whole folder from one process that can read every whole tensor.

    sizes: tensor -> bytes, in the order of the files. read: returns a tensor by name; called once for each.
    """
    files = plan_export(sizes, dict.fromkeys(sizes, (0,)), max_shard_bytes)
    num_bytes = sum(sizes.values())
    write_files(
        target,
        files,
        lambda file: {name: read(name) for name in file.tensors},
        lambda folder: describe_model(folder, files, num_bytes, description),
    )
