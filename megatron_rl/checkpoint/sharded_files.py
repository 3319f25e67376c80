"""Write megatron-core's checkpoints, at once or in a background thread, and read them.

Phase 1: all ranks agree on who writes what, and put a copy of it into host memory.
Phase 2: each rank writes its files; nothing is communicated, so a thread can do it while training continues.
Phase 3: all ranks are done, and rank 0 writes the table of contents, without which the folder is no checkpoint.
"""

from __future__ import annotations

import dataclasses
import threading
from functools import partial
from inspect import signature
from itertools import count, takewhile
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX

from megatron_rl.checkpoint.storage import storage_reason
from megatron_rl.errors import StorageError

OWN_WRITER = {"async_strategy": "mcore"} if "async_strategy" in signature(dist_checkpointing.save).parameters else {}
"""Megatron's own writer, where it has another by default, which needs a package that the index does not have."""


COMMON = "common.pt"
"""Holds what is no tensor: nothing, here. megatron-core 0.16 reads no folder without it, and 0.19 does not write it."""


class CheckpointWriter:
    """Saves of one rank that are in progress; all ranks must call every method together."""

    def __init__(self, device: torch.device) -> None:
        """`device`: of the tensors that ranks exchange."""
        self._device = device
        self._under_way: list[tuple[threading.Thread, AsyncRequest]] = []

    def save(self, state: dict[str, ShardedTensor], folder: Path, beside_training: bool) -> None:
        """Write `state` to an empty folder. beside_training: return after phase 1, when the tensors may change."""
        # Phase 1
        if beside_training:
            state = {name: apart(tensor) for name, tensor in state.items()}
        request = dist_checkpointing.save(state, str(folder), async_sharded_save=True, **OWN_WRITER)
        arguments = list(request.async_fn_args)
        if request.preload_fn is not None:
            arguments[1] = request.preload_fn()
        common = folder / COMMON
        if dist.get_rank() == 0 and not common.exists():
            torch.save({}, common)
        # Phase 2
        write = partial(request.async_fn, *arguments, **request.async_fn_kwargs) if request.async_fn else None
        thread = threading.Thread(target=write)
        thread.start()
        self._under_way.append((thread, request))
        if not beside_training:
            thread.join()

    def finish(self, wait: bool) -> bool:
        """Run phase 3 of every save if all ranks have written their files; returns whether they have.

        wait: wait for the files. Raises StorageError on all ranks if any rank could not write.
        """
        if wait:
            for thread, _ in self._under_way:
                thread.join()
        writing = torch.tensor(sum(thread.is_alive() for thread, _ in self._under_way), device=self._device)
        dist.all_reduce(writing)
        if int(writing):
            return False
        while self._under_way:
            _, request = self._under_way.pop(0)
            try:
                for finalize in request.finalize_fns:
                    finalize()
            except CheckpointException as error:  # a BaseException, which nobody between here and the driver expects
                raise self._failure(error) from error
        return True

    def _failure(self, error: CheckpointException) -> Exception:
        """The error of rank 0, which alone knows the failures of all ranks; all must call."""
        failures = [failed_write(error)]
        dist.broadcast_object_list(failures, src=0, device=self._device)
        return failures[0]


def apart(tensor: ShardedTensor) -> ShardedTensor:
    """Copy a tensor if megatron-core would write from the memory that training changes.

    megatron-core itself copies tensors on a device, and host tensors that are part of a larger one.
    """
    data = tensor.data
    if data.device.type != "cpu" or data.untyped_storage().nbytes() != data.numel() * data.element_size():
        return tensor
    return dataclasses.replace(tensor, data=data.clone())


def failed_write(error: CheckpointException) -> Exception:
    """The error for a save that failed on some ranks: StorageError if files could not be written on all of these."""
    failures = {rank: failure for rank, (failure, _) in error.failures.items()}
    reasons = {rank: storage_reason(failure) for rank, failure in failures.items()}
    if None in reasons.values():
        return RuntimeError(f"the checkpoint could not be written: {error}")
    return StorageError("; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(reasons.items())))


def files_of_rank(folder: Path, rank: int) -> list[Path]:
    """The files that a rank has written to `folder`, by their names, which megatron-core numbers from 0.

    The folder is not listed: it has those of all ranks, and each rank would read the names of all.
    """
    files = (folder / f"__{rank}_{number}{DEFAULT_SUFFIX}" for number in count())
    return [*takewhile(Path.exists, files)]


def read(state: dict[str, ShardedTensor], folder: Path) -> None:
    """Fill the tensors of `state` from a complete folder; all ranks must call.

    Raises OSError on all ranks when any could not read, or a tensor is missing or has another shape there.
    """
    try:
        dist_checkpointing.load(state, str(folder))
    except CheckpointException as error:
        raise OSError(f"{folder} could not be read: {error}") from error
