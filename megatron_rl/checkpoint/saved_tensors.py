"""The whole tensors of a checkpointed role, read by one process that needs no layout, no Megatron and no other rank."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_rl.checkpoint.tensor_keys import OPTIMIZER_PREFIX


class KeptMetadata(FileSystemReader):
    """Reads the table of contents once, however often tensors are read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = super().read_metadata()

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """The table of contents."""
        return self._metadata


class SavedTensors:
    """The tensors in a role's folder, such as `global_step_20/actor`, by their name.

    The folder's table of contents is a pickle: look at it with `pickles.forbidden_globals` first.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = KeptMetadata(folder)
        entries = self._reader.read_metadata().state_dict_metadata
        self._entries = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    @property
    def names(self) -> list[str]:
        """All tensors: weights, and what the optimizer keeps for them."""
        return list(self._entries)

    @property
    def weights(self) -> list[str]:
        """The weights alone."""
        return [name for name in self._entries if not name.startswith(OPTIMIZER_PREFIX)]

    def dtype(self, name: str) -> torch.dtype:
        """Of the elements of one tensor."""
        return self._entries[name].properties.dtype

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """These tensors, whole, on the CPU. Raises KeyError for one that is not there."""
        tensors = {name: torch.empty(self._entries[name].size, dtype=self.dtype(name)) for name in names}
        load(tensors, storage_reader=self._reader, no_dist=True)
        return tensors
