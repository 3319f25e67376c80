"""The host of `scale.py`'s ranks: it answers, and does nothing else."""

from __future__ import annotations

import os

from megatron_rl.dispatch import Coordinates, Dispatch, remote_method
from megatron_rl.records import Batch


class SmallHost:
    """Every rank is a data-parallel rank of its own."""

    @remote_method(Dispatch.ONE_TO_ALL)
    def coordinates(self) -> Coordinates:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return Coordinates(rank, rank, size, True, rank, size, True)

    @remote_method(Dispatch.ONE_TO_ALL)
    def noop(self) -> None:
        """Nothing."""

    @remote_method(Dispatch.DP)
    def scores(self, batch: Batch) -> Batch:
        """One number of each of this rank's rows."""
        return Batch(scores=batch["scores"] + 1)
