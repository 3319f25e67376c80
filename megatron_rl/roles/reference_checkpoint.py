"""A reference that has moved, and lives in another pool than its policy, in a checkpoint.

It is a folder next to the policy's, with the tensors that a reference in the policy's pool has in the policy's own
files. Either is read, whatever pool the reference is in now.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from megatron.core.dist_checkpointing import ShardedTensor

from megatron_rl.checkpoint.contents import reference_beside
from megatron_rl.checkpoint.saved_tensors import REFERENCE_WEIGHT
from megatron_rl.checkpoint.sharded_files import CheckpointWriter
from megatron_rl.checkpoint.sharded_state import FlatRun, sharded_state, written_at
from megatron_rl.model.families import ParamSpec
from megatron_rl.roles.reference_refresh import ReferenceRefresh
from megatron_rl.roles.role_checkpoint import SavedFolder, SavedState

if TYPE_CHECKING:
    from megatron_rl.roles.model_source import ModelSource


class ReferenceCheckpoint:
    """Saves and loads a reference on the ranks of its own pool; all of them must call every method.

    specs: specs of the parameters that follow the policy, by global Megatron names.
    """

    def __init__(self, following: ReferenceRefresh, specs: dict[str, ParamSpec], source: ModelSource) -> None:
        self._following, self._specs = following, specs
        self._place, self._groups = source.place, source.groups

    @property
    def has_moved(self) -> bool:
        """Whether there is something to keep; equal on all ranks."""
        return self._following.has_moved

    def save(self, folder: Path, writer: CheckpointWriter, beside_training: bool) -> None:
        """Write to `folder`, which is empty or not there; complete when `writer.finish` returns True."""
        folder.mkdir(parents=True, exist_ok=True)
        writer.save(self.owned_tensors(), folder, beside_training)

    def owned_tensors(self) -> dict[str, ShardedTensor]:
        """Views of everything that this rank saves; over all ranks each element is there once."""
        written, grid, rank = written_at(self._place, self._specs), self._groups.grid, self._groups.rank
        runs = [
            run
            for run in self._runs()
            if run.name in written and grid.is_first_replica(rank, of_experts=self._specs[run.name].tensor.is_expert)
        ]
        tensors = sharded_state(runs, self._specs, self._place)
        bias = self._following.bias
        if bias is not None and bias.has_moved and bias.writes:
            tensors |= sharded_state(bias.runs(), bias.specs, self._place)
        return tensors

    def load(self, folder: Path) -> None:
        """Take a moved reference out of the policy's folder, in whatever layout it was saved; there may be none."""
        apart = reference_beside(folder)
        self.load_from(SavedFolder(apart if apart.is_dir() else folder))

    @torch.no_grad()
    def load_from(self, source: SavedState) -> None:
        """Take a moved reference out of `source`, if it has one."""
        if not self._following.is_in(source.names, self._specs):
            return
        tensors = sharded_state(self._runs(), self._specs, self._place)
        bias = self._following.bias
        if bias is not None and bias.is_in(source.names):
            tensors |= sharded_state(bias.runs(), bias.specs, self._place)
            bias.has_moved = True
        source.read(tensors)
        self._following.has_moved = True

    def _runs(self) -> Iterator[FlatRun]:
        for name, tensor in self._following.reference.items():
            yield FlatRun(name, REFERENCE_WEIGHT, 0, tensor.detach().view(-1))
