"""The hosts of the ranks of `scale.py` and `scale_held.py`: they answer, and do nothing else."""

from __future__ import annotations

import os

from megatron_rl.dispatch import Coordinates, Dispatch, remote_method
from megatron_rl.records import Batch

WIDTH = 8


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


class HoldingHost(SmallHost):
    """Makes a column that stays with the ranks, and reads one."""

    @remote_method(Dispatch.DP)
    def wide(self, batch: Batch) -> Batch:
        """`teacher_hidden`: the number of each token, WIDTH times."""
        tokens = batch.sampled_ids.values().float()
        return Batch(teacher_hidden=batch.per_sampled_token(tokens[:, None].repeat(1, WIDTH)))

    @remote_method(Dispatch.DP)
    def sums(self, batch: Batch) -> Batch:
        """`advantages`: the sum of each token's column."""
        return Batch(advantages=batch.per_sampled_token(batch["teacher_hidden"].values().sum(1)))
