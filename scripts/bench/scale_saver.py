"""The host of `scale_saves.py`'s ranks: it meets the others, and writes its part of a checkpoint."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from scale_worker import SmallHost

from megatron_rl.checkpoint.manifest import digest_files
from megatron_rl.checkpoint.sharded_files import CheckpointWriter, files_of_rank
from megatron_rl.dispatch import Dispatch, remote_method
from megatron_rl.roles.environment import RankEnvironment
from megatron_rl.roles.rendezvous import file_store, open_store
from third_party_patches import apply_patches

ELEMENTS = 16
LISTING = ("os.listdir", "os.scandir")
CHANGING = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink")
TIMEOUT = timedelta(seconds=300)


class Operations:
    """Counts what a process asks of folders below one, by Python's audit events; a hook cannot be taken back."""

    def __init__(self, below: Path) -> None:
        self.counts: Counter[str] = Counter()
        self._below = str(below)
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" and event not in LISTING + CHANGING:
            return
        path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
        if path.startswith(self._below):
            self.counts["listed" if event in LISTING else event.removeprefix("os.")] += 1


class SavingHost(SmallHost):
    """Every rank has its own piece of one tensor."""

    @remote_method(Dispatch.ONE_TO_ALL)
    def meet_late(self, file: str, late_s: float) -> tuple[float, float, float]:
        """Meet at a store in a file to which rank 0 comes `late_s` late.

        Returns the dates at which this rank came and left, and the CPU seconds that it spent meanwhile.
        """
        environment = RankEnvironment.read()
        if environment.rank == 0:
            time.sleep(late_s)
        came, cpu = time.time(), time.process_time()
        store = file_store(file, environment.world_size, TIMEOUT)
        if store.add("met", 1) == environment.world_size:
            store.set("all", "here")
        store.wait(["all"])
        return came, time.time(), time.process_time() - cpu

    @remote_method(Dispatch.ONE_TO_ALL)
    def join(self) -> None:
        """Make the group of all ranks."""
        apply_patches("cpu")
        environment = RankEnvironment.read()
        store = open_store(environment, TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=environment.rank, world_size=environment.world_size)

    @remote_method(Dispatch.ONE_TO_ALL)
    def save(self, folder: Path) -> dict[str, int]:
        """Write a checkpoint and name this rank's files; returns what it asked of the folder, and its files."""
        asked, writer = Operations(folder), CheckpointWriter(torch.device("cpu"))
        rank, size = dist.get_rank(), dist.get_world_size()
        piece = torch.full((ELEMENTS,), float(rank))
        state = {"weights": ShardedTensor.from_rank_offsets("weights", piece, (0, rank, size))}
        writer.save(state, folder, beside_training=False)
        assert writer.finish(wait=True)
        files = files_of_rank(folder, rank)
        digest_files(folder, [file.name for file in files])
        return dict(asked.counts) | {"files": len(files)}
