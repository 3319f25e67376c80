"""Copies of training states: several models of one shape take turns in one set of buffers.

Copies that take turns are in host memory, by name. Those that are to last are files, safetensors, one of each rank: its
own shards, so that they fit one layout.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.roles.training import TrainableModel

WEIGHTS, MOMENTS, GRADIENTS = "weights", "moments", "gradients"
STATE = (WEIGHTS, MOMENTS, GRADIENTS)
"""Parts of a training state. weights: with the masters of 16-bit ones. moments: with Adam's count of steps. gradients:
sums of passes since the last step."""


SUM_OF_LOSSES, NUM_TOKENS, ADAM_STEP = "sum_of_losses", "num_tokens", "adam_step"
UNFINISHED = ".unfinished"


@dataclass(frozen=True)
class KeptState:
    """One rank's share of a state: tensors of its parts, Adam's count of steps, and the loss and tokens of the sums."""

    tensors: dict[str, list[Tensor]]
    adam_step: int
    sums: tuple[Tensor, int]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.nbytes for tensors in self.tensors.values() for one in tensors)


def _write(file: Path, kept: KeptState) -> int:
    tensors = {f"{part}.{place}": one for part, own in kept.tensors.items() for place, one in enumerate(own)}
    tensors[SUM_OF_LOSSES] = kept.sums[0].detach().to("cpu", copy=True).reshape(1)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(UNFINISHED)
    save_file(tensors, unfinished, {ADAM_STEP: str(kept.adam_step), NUM_TOKENS: str(kept.sums[1])})
    with unfinished.open("rb") as written:
        os.fsync(written.fileno())
    unfinished.replace(file)
    return kept.num_bytes


def _count(names: Sequence[str], part: str) -> int:
    """Return the number of tensors that a file has of a part. Raises KeyError if there are none."""
    if not (number := sum(name.startswith(f"{part}.") for name in names)):
        raise KeyError(part)
    return number


class TrainingStates:
    """The copies of one rank. All ranks of the pool must call every method."""

    def __init__(self, trainable: TrainableModel) -> None:
        self._trainable = trainable
        self._kept: dict[str, KeptState] = {}
        trainable.adam.create()

    def keep(self, name: str, parts: Sequence[str] = STATE) -> int:
        """Copy parts of the present state, in place of an older copy of this name; returns its bytes on this rank."""
        self._kept[name] = kept = self._copied(parts)
        return kept.num_bytes

    def write(self, file: Path, parts: Sequence[str] = STATE) -> int:
        """Write parts of the present state to a file, whole or not at all; returns its bytes."""
        return _write(file, self._copied(parts))

    def write_copy(self, name: str, file: Path) -> int:
        """Write a copy of this name to a file, as `write` does."""
        return _write(file, self._kept[name])

    def read_copy(self, name: str, file: Path) -> None:
        """Have a file's content as the copy of this name."""
        self._kept[name] = self._of_file(file, STATE)

    def flat_weights(self, name: str, file: Path | None = None) -> list[Tensor]:
        """The flat buffers of parameters, without masters, in a file, or else in the copy of this name."""
        places = range(len(self._trainable.param_buffers))
        if file is None:
            return [self._kept[name].tensors[WEIGHTS][place] for place in places]
        with safe_open(file, "pt") as opened:
            return [opened.get_tensor(f"{WEIGHTS}.{place}") for place in places]

    def _copied(self, parts: Sequence[str]) -> KeptState:
        trainable = self._trainable
        trainable.sync.finish()
        copies = {part: [one.to("cpu", copy=True) for one in self._tensors(part)] for part in parts}
        return KeptState(copies, trainable.adam.step, trainable.sums)

    def take(self, name: str, parts: Sequence[str] = STATE) -> None:
        """Continue with parts of a copy; moments and gradients that are not asked for are 0. Raises KeyError for a
        name or a part that was not kept.
        """
        self._continue(self._kept[name], parts)

    def read(self, file: Path, parts: Sequence[str] = STATE) -> None:
        """Continue with parts of a file, as `take` does. Raises KeyError for a part that it does not have."""
        self._continue(self._of_file(file, parts), parts)

    @torch.no_grad()
    def _continue(self, kept: KeptState, parts: Sequence[str]) -> None:
        trainable = self._trainable
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

    def _of_file(self, file: Path, parts: Sequence[str]) -> KeptState:
        with safe_open(file, "pt") as opened:
            names, head = opened.keys(), opened.metadata()
            tensors = {
                part: [opened.get_tensor(f"{part}.{place}") for place in range(_count(names, part))] for part in parts
            }
            loss: Tensor = opened.get_tensor(SUM_OF_LOSSES)
        sums = loss.to(self._trainable.device).reshape(()), int(head[NUM_TOKENS])
        return KeptState(tensors, int(head[ADAM_STEP]), sums)

    def take_weights(self, name: str) -> None:
        """Put the weights of a copy into the buffers; moments and gradients stay as they are."""
        self._put(self._kept[name].tensors[WEIGHTS])

    def read_weights(self, file: Path) -> None:
        """Put the weights of a file into the buffers; moments and gradients stay as they are."""
        self._put(self._of_file(file, (WEIGHTS,)).tensors[WEIGHTS])

    @torch.no_grad()
    def _put(self, weights: Sequence[Tensor]) -> None:
        self._trainable.sync.finish()
        for tensor, copied in zip(self._tensors(WEIGHTS), weights, strict=True):
            tensor.copy_(copied)

    @torch.no_grad()
    def write_weights(self, write: Callable[[], None]) -> None:
        """Have a function write the weights in their buffers; masters and copies on the host follow."""
        self._trainable.sync.finish()
        write()
        self._trainable.optimizer.reload_model_params()
        self._trainable.adam.take_weights()

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
