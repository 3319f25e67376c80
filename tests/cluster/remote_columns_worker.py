"""Ranks that make a wide column of their rows, and ranks that read it; one data-parallel rank each."""

from __future__ import annotations

import os
import signal

import torch

from megatron_rl.cluster.launcher import Launcher, Ranks
from megatron_rl.cluster.pool import ProcessPool
from megatron_rl.dispatch import Coordinates, Dispatch, remote_method
from megatron_rl.records import Batch, ragged_from_lengths, single_turn

WIDTH = 512


class Maker:
    """Numbers that follow from a row's tokens, whoever makes them."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])

    @remote_method(Dispatch.ONE_TO_ALL)
    def coordinates(self) -> Coordinates:
        size = int(os.environ["WORLD_SIZE"])
        return Coordinates(self.rank, self.rank, size, True, self.rank, size, True)

    @remote_method(Dispatch.DP)
    def make(self, batch: Batch) -> tuple[dict[str, int], Batch]:
        """`teacher_hidden`, which is held where it is large, and `old_log_probs`, which is not."""
        tokens = batch.sampled_ids.values()
        hidden, own = numbers(tokens), batch.per_sampled_token(tokens.float())
        return {"rank": self.rank}, Batch(teacher_hidden=batch.per_sampled_token(hidden), old_log_probs=own)

    @remote_method(Dispatch.DP)
    def die(self, batch: Batch) -> Batch:
        """Rank 1 is killed when it has read its rows."""
        batch.flat("teacher_hidden")
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return Batch(old_log_probs=batch["old_log_probs"])


class Reader(Maker):
    """What arrives, as sums, which are exact."""

    @remote_method(Dispatch.DP)
    def sums(self, batch: Batch) -> Batch:
        """`advantages`: of each token, the sum of its numbers, which must be those that follow from it."""
        hidden = batch["teacher_hidden"].values()
        assert torch.equal(hidden, numbers(batch.sampled_ids.values())), "numbers of other rows"
        return Batch(advantages=batch.per_sampled_token(hidden.sum(1)))


def numbers(tokens: torch.Tensor) -> torch.Tensor:
    """float32 [N, WIDTH] of tokens [N]: whole numbers, so that any order of adding gives the same sum."""
    return ((tokens[:, None] * 31 + torch.arange(WIDTH) * 7) % 1009).float()


def rows(num_rows: int, per_row: int) -> Batch:
    """Rows of up to `per_row` tokens and one before, no two alike."""
    lengths = torch.tensor([1 + per_row - row % 3 for row in range(num_rows)])
    return single_turn(ragged_from_lengths(torch.arange(int(lengths.sum())), lengths), lengths - 1)


def expected_sums(batch: Batch) -> list[float]:
    """What `Reader.sums` answers, made here."""
    return numbers(batch.sampled_ids.values()).sum(1).tolist()


def num_held_files(launcher: Launcher) -> int:
    """Count the files of held columns. They are all on this machine, and Ray's agents may be slow to answer."""
    return sum(name.startswith("held-") for name in launcher.scratch.segments())


def pool(name: str, ranks: Ranks, kind: type) -> ProcessPool:
    return ProcessPool(name, ranks, kind)
