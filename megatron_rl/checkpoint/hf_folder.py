"""Write a Hugging Face folder file by file: which tensor goes where, and what lies beside the weights.

A folder is written under a temporary name and renamed when it is complete, so that no reader sees half of one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer

from megatron_rl.checkpoint.storage import free_space, storage_reason
from megatron_rl.errors import StorageError
from megatron_rl.model.families import REWARD_FAMILIES

MAX_SHARD_BYTES = 1 << 30
"""A file of weights is no larger, unless one tensor is."""


@dataclass(frozen=True)
class Description:
    """What a folder says about its weights: the config and tokenizer of `source`, with this architecture and dtype."""

    source: Path
    architecture: str
    dtype: torch.dtype


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
    """As transformers names them: model.safetensors when alone, else numbered from 1."""
    if num_files == 1:
        return ["model.safetensors"]
    return [f"model-{number:05}-of-{num_files:05}.safetensors" for number in range(1, num_files + 1)]


def start_folder(target: Path) -> Path:
    """An empty folder beside `target` to write into; what an earlier attempt left there is removed."""
    unfinished = unfinished_folder(target)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def unfinished_folder(target: Path) -> Path:
    """Where `target` is written until it is complete."""
    return target.with_name(target.name + ".unfinished")


@contextmanager
def removing_unfinished(target: Path) -> Iterator[None]:
    """Where the body fails, delete what it has written of `target`: on a full disk it is in the way of all else."""
    try:
        yield
    except Exception:
        shutil.rmtree(unfinished_folder(target), ignore_errors=True)
        raise


def save_tensors(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write one file of weights; tensors must not share memory. Raises StorageError, with the bytes that were free
    before it."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    file.touch()
    mode = file.stat().st_mode  # by the umask, as of all files; safetensors makes its own for the owner alone
    room = free_space(file)
    try:
        save_file(contiguous, file, metadata={"format": "pt"})
    except Exception as error:  # safetensors' own class, which quotes the system; what was written is gone by now
        reason = storage_reason(error)
        if reason is None:
            raise
        size = sum(tensor.nbytes for tensor in tensors.values())
        raise StorageError(f"{reason}; {room}, and {file.name} has {size:,}") from error
    file.chmod(mode)


def write_index(folder: Path, files: dict[str, list[str]], num_bytes: int) -> None:
    """Say which file holds which tensor, where there are several. `num_bytes`: of all tensors."""
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def finish_folder(target: Path, files: dict[str, list[str]], num_bytes: int, description: Description) -> None:
    """Write all but the weights, and put the folder in place of `target`.

    files: file -> its tensors; num_bytes: of all tensors.
    """
    unfinished = unfinished_folder(target)
    write_index(unfinished, files, num_bytes)
    source = description.source
    hf_config = AutoConfig.from_pretrained(source)
    hf_config.architectures = [description.architecture]
    hf_config.dtype = description.dtype
    if description.architecture in REWARD_FAMILIES:
        hf_config.num_labels = 1
    hf_config.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(source).save_pretrained(unfinished)
    if (source / "generation_config.json").exists():
        shutil.copy(source / "generation_config.json", unfinished)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)


def write_hf_folder(
    target: Path,
    sizes: dict[str, int],
    read: Callable[[str], torch.Tensor],
    description: Description,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a whole folder from one process that can read each whole tensor, one file in memory at a time.

    sizes: tensor -> bytes, in the order of the files; read: a tensor by name, asked for once. An existing `target` is
    replaced.
    """
    groups = plan_files(sizes, max_shard_bytes)
    files = dict(zip(file_names(len(groups)), groups, strict=True))
    unfinished = start_folder(target)
    for file, names in files.items():
        save_tensors({name: read(name) for name in names}, unfinished / file)
    finish_folder(target, files, sum(sizes.values()), description)
