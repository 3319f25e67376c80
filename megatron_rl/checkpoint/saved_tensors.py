"""The whole tensors of a checkpointed role, read by one process that needs no layout, no Megatron and no other rank."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_rl.checkpoint.sharded_state import OPTIMIZER_PREFIX


class SavedTensors:
    """The tensors in a role's folder, such as `global_step_20/actor`, by their name.

    The folder's table of contents is a pickle: look at it with `pickles.forbidden_globals` first.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
        self._metadata = {name: entry for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}

    @property
    def weights(self) -> list[str]:
        """Names of the weights; the others are the optimizer's."""
        return [name for name in self._metadata if not name.startswith(OPTIMIZER_PREFIX)]

    @property
    def names(self) -> list[str]:
        return list(self._metadata)

    def num_bytes(self, name: str) -> int:
        """Size of one tensor."""
        return self._metadata[name].size.numel() * self._metadata[name].properties.dtype.itemsize

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._metadata[name].size)

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """These tensors, whole, on the CPU."""
        tensors = {
            name: torch.empty(self._metadata[name].size, dtype=self._metadata[name].properties.dtype) for name in names
        }
        load(tensors, storage_reader=FileSystemReader(self._folder), no_dist=True)
        return tensors
