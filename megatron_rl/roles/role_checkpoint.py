"""A role's part of a checkpoint: its weights, its optimizer's state, the position of its schedule; a moved reference.

The distributed optimizer has already divided every parameter among the data-parallel ranks, so each rank writes the
elements that it updates: nothing is gathered, nothing is written twice. A rank reads the weights of its whole shard.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from megatron.core.dist_checkpointing import ShardedTensor

from megatron_rl.checkpoint.contents import reference_beside
from megatron_rl.checkpoint.saved_tensors import REFERENCE_WEIGHT, WEIGHT, SavedTensors
from megatron_rl.checkpoint.sharded_files import CheckpointWriter, read
from megatron_rl.checkpoint.sharded_state import FlatRun, sharded_state, written_at
from megatron_rl.model.families import ParamSpec
from megatron_rl.parallel.sharding import Place
from megatron_rl.records import RoleState
from megatron_rl.roles.adam import KEPT
from megatron_rl.roles.expert_bias import ExpertBias
from megatron_rl.roles.model_source import ModelSource, named_parameters
from megatron_rl.roles.reference_refresh import ReferenceRefresh
from megatron_rl.roles.training import TrainableModel


class SavedState(Protocol):
    """A role's saved tensors, in whatever layout. Every rank must call `read`."""

    @property
    def names(self) -> Collection[str]:
        """Keys of all tensors."""

    def read(self, tensors: dict[str, ShardedTensor]) -> None:
        """Fill the tensors' data in place."""


class SavedFolder:
    """A role's folder in a complete checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def names(self) -> list[str]:
        """Keys of all tensors."""
        return SavedTensors(self._folder).names

    def read(self, tensors: dict[str, ShardedTensor]) -> None:
        """Fill the tensors' data in place. Raises as `sharded_files.read`."""
        read(tensors, self._folder)


class RoleCheckpoint:
    """Saves and loads a `TrainableModel`; all ranks must call every method.

    specs: global Megatron name -> spec, of every trained parameter that a rank may hold. place: this rank's.
    """

    def __init__(self, trainable: TrainableModel, specs: dict[str, ParamSpec], place: Place) -> None:
        self.trainable = trainable
        self.specs = specs
        self.place = place
        self.bias: ExpertBias | None = None
        """The experts' selection biases, for models that have them."""
        self.reference: ReferenceRefresh | None = None
        """The policy's reference, if it may follow the policy."""

    def save(self, folder: Path, writer: CheckpointWriter, beside_training: bool) -> RoleState:
        """Write to `folder`, which exists and is empty; complete when `writer.finish` returns True."""
        writer.save(self.owned_tensors(), folder, beside_training)
        return self.state

    def owned_tensors(self) -> dict[str, ShardedTensor]:
        """Views of everything that this rank saves; over all ranks each element is there once."""
        self.trainable.adam.create()
        written = written_at(self.place, self.specs)
        runs = [run for run in self._owned_runs() if run.name in written]
        tensors = sharded_state(runs, self.specs, self.place)
        for bias in self._biases():
            if bias.has_moved and bias.writes:
                tensors |= sharded_state(bias.runs(), bias.specs, self.place)
        if self.reference is not None and self.reference.has_moved:
            tensors |= sharded_state(self.reference.runs_like(runs), self.specs, self.place)
        return tensors

    @torch.no_grad()
    def load(self, folder: Path, state: RoleState) -> None:
        """Overwrite weights and optimizer with those of `folder`, in whatever layout they were saved."""
        self.load_from(SavedFolder(folder), state)
        apart = reference_beside(folder)
        if self.reference is not None and apart.is_dir():
            source = SavedFolder(apart)
            source.read(self._reference_tensors(source))

    @torch.no_grad()
    def load_from(self, source: SavedState, state: RoleState) -> None:
        """Overwrite weights and optimizer with those of `source`."""
        self.trainable.adam.create()
        runs = [*self._weight_runs(), *(run for run in self._owned_runs() if run.kind != WEIGHT)]
        tensors = sharded_state(runs, self.specs, self.place)
        if self.bias is not None and self.bias.is_in(source.names):
            tensors |= sharded_state(self.bias.runs(), self.bias.specs, self.place)
            self.bias.has_moved = True
        source.read(tensors | self._reference_tensors(source))
        self.trainable.continue_from(state.num_updates, state.adam_step)
        self.trainable.loss_scaling.set(state.loss_scale, state.good_steps)

    def _reference_tensors(self, source: SavedState) -> dict[str, ShardedTensor]:
        """Views of a reference that has moved, and of its biases, as far as `source` has them."""
        reference, tensors = self.reference, dict[str, ShardedTensor]()
        if reference is None or not reference.is_in(source.names, self.specs):
            return tensors
        reference.has_moved = True
        tensors |= sharded_state(reference.runs_like(self._weight_runs()), self.specs, self.place)
        if reference.bias is not None and reference.bias.is_in(source.names):
            tensors |= sharded_state(reference.bias.runs(), reference.bias.specs, self.place)
            reference.bias.has_moved = True
        return tensors

    @property
    def state(self) -> RoleState:
        """Current position of schedule and optimizer."""
        scaling = self.trainable.loss_scaling
        return RoleState(
            self.trainable.scheduler.num_steps, self.trainable.adam.step, scaling.scale, scaling.good_steps
        )

    def _biases(self) -> list[ExpertBias]:
        """Biases of the role's experts, and of those of a reference that follows it."""
        every = [self.bias, None if self.reference is None else self.reference.bias]
        return [bias for bias in every if bias is not None]

    def _weight_runs(self) -> Iterator[FlatRun]:
        for name, parameter in named_parameters(self.trainable.models).items():
            if name not in self.specs:  # frozen
                continue
            yield FlatRun(name, WEIGHT, 0, parameter.detach().view(-1))

    def _owned_runs(self) -> Iterator[FlatRun]:
        """The runs that this rank's optimizer updates: the weights, their moments, and masters where there are some."""
        names = {parameter: name for name, parameter in named_parameters(self.trainable.models).items()}
        for parameter, start, state in self.trainable.adam.runs():
            weights = parameter.detach().view(-1)[start : start + len(state["param"])]
            yield FlatRun(names[parameter], WEIGHT, start, weights)
            for kind in (kind for kind in KEPT if kind in state):
                yield FlatRun(names[parameter], kind, start, state[kind])
            # A float32 parameter is its own master.
            if parameter.dtype != state["param"].dtype:
                yield FlatRun(names[parameter], "param", start, state["param"].detach())


class ReferenceCheckpoint:
    """Saves and loads a reference that has moved, and lives in another pool than its policy.

    It is a folder next to the policy's, with the tensors that a reference in the policy's pool has in the policy's own
    files. Either is read, whatever pool the reference is in now. All ranks of its pool must call every method.

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
