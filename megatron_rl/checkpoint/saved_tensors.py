"""The tensors of a saved role: their names, which no layout decides, and a reader for one process without Megatron.

A key is the Hugging Face name of the tensor (of experts: without their number, all of a layer stacked in dim 0); the
optimizer's keys are prefixed as Megatron prefixes them. Shapes are those of whole tensors, without padding. So a
checkpoint of one layout is read in any other, and a reader without a layout finds a weight by its name.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_rl.model.families import ParamSpec

WEIGHT = "weight"
"""The kind of the parameters themselves; other kinds are the optimizer's names for its state."""
BIAS = "expert_bias"
"""The kind of the experts' selection biases, saved once training has changed them."""
REFERENCE_WEIGHT = "reference"
"""The kind of the reference's parameters, saved once they have moved to the policy's."""
REFERENCE_BIAS = "reference_expert_bias"
"""The kind of the reference's selection biases, saved once they have moved to the policy's."""
OPTIMIZER_PREFIX = "optimizer.state."


def checkpoint_key(spec: ParamSpec, segment: int, kind: str = WEIGHT) -> str:
    """The name of a segment, or of the optimizer's state for it, in a checkpoint."""
    name = spec.hf_names[segment].replace("{expert}.", "")
    return name if kind == WEIGHT else f"{OPTIMIZER_PREFIX}{kind}.{name}"


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
        self.kept = lru_cache(maxsize=2)(self._whole)
        """One tensor by its name; the last two are kept, for what reads a stack of experts one by one."""

    @property
    def names(self) -> list[str]:
        """All tensors: weights and optimizer state."""
        return list(self._entries)

    @property
    def weights(self) -> list[str]:
        """The weights alone."""
        return [name for name in self._entries if not name.startswith(OPTIMIZER_PREFIX)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one whole tensor."""
        return tuple(self._entries[name].size)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of one tensor."""
        return self._entries[name].properties.dtype

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read these tensors, whole, to the CPU. Raises KeyError for one that does not exist."""
        tensors = {name: torch.empty(self._entries[name].size, dtype=self.dtype(name)) for name in names}
        load(tensors, storage_reader=self._reader, no_dist=True)
        return tensors

    def _whole(self, name: str) -> torch.Tensor:
        return self.read([name])[name]
