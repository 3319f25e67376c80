"""Copies of training states in host memory, by name: several models of one shape take turns in one set of buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.roles.training import TrainableModel

WEIGHTS, MOMENTS, GRADIENTS = "weights", "moments", "gradients"
STATE = (WEIGHTS, MOMENTS, GRADIENTS)
"""Parts of a training state. weights: with the masters of 16-bit ones. moments: with Adam's count of steps. gradients:
sums of passes since the last step."""


@dataclass(frozen=True)
class KeptState:
    """One rank's share of a state: tensors of its parts, Adam's count of steps, and the loss and tokens of the sums."""

    tensors: dict[str, list[Tensor]]
    adam_step: int
    sums: tuple[Tensor, int]


class TrainingStates:
    """The copies of one rank. All ranks of the pool must call every method."""

    def __init__(self, trainable: TrainableModel) -> None:
        self._trainable = trainable
        self._kept: dict[str, KeptState] = {}
        trainable.adam.create()

    def keep(self, name: str, parts: Sequence[str] = STATE) -> int:
        """Copy parts of the present state, in place of an older copy of this name; returns its bytes on this rank."""
        trainable = self._trainable
        trainable.sync.finish()
        copies = {part: [one.to("cpu", copy=True) for one in self._tensors(part)] for part in parts}
        self._kept[name] = KeptState(copies, trainable.adam.step, trainable.sums)
        return sum(one.nbytes for tensors in copies.values() for one in tensors)

    @torch.no_grad()
    def take(self, name: str, parts: Sequence[str] = STATE) -> None:
        """Continue with parts of a copy; moments and gradients that are not asked for are 0. Raises KeyError for a
        name or a part that was not kept.
        """
        trainable, kept = self._trainable, self._kept[name]
        trainable.sync.finish()
        for part in STATE:
            if part in parts:
                for tensor, copied in zip(self._tensors(part), kept.tensors[part], strict=True):
                    tensor.copy_(copied)
            elif part != WEIGHTS:
                for tensor in self._tensors(part):
                    tensor.zero_()
        trainable.sums = kept.sums if GRADIENTS in parts else trainable.no_sums
        trainable.adam.set_step(kept.adam_step if MOMENTS in parts else 0)
        trainable.adam.take_weights()

    @torch.no_grad()
    def take_weights(self, name: str) -> None:
        """Put the weights of a copy into the buffers; moments and gradients stay as they are."""
        self._trainable.sync.finish()
        for tensor, copied in zip(self._tensors(WEIGHTS), self._kept[name].tensors[WEIGHTS], strict=True):
            tensor.copy_(copied)

    def drop(self, name: str) -> None:
        """Forget a copy, if it exists."""
        self._kept.pop(name, None)

    def _tensors(self, part: str) -> list[Tensor]:
        trainable = self._trainable
        if part == GRADIENTS:
            return [buffer.grad_data for buffer in trainable.param_buffers]
        moments = trainable.adam.since_first_step()
        if part == MOMENTS:
            return moments
        own = {tensor.data_ptr() for tensor in moments}
        masters = [one for one in trainable.optimizer_state() if one.data_ptr() not in own and one.dim()]
        return [*(buffer.param_data for buffer in trainable.param_buffers), *masters]
