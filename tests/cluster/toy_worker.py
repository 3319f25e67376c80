"""A healthy worker small enough to see through, on 4 ranks as dp=2 x tp=2; replicas run against the rank order."""

from __future__ import annotations

import os
import time

import torch

from megatron_rl.dispatch import Coordinates, Dispatch, remote_method
from megatron_rl.records import Batch, ragged_from_lengths, row_lengths


def toy(row: torch.Tensor, tokens: torch.Tensor, weight: torch.Tensor | None = None) -> Batch:
    """row int64 [B]; tokens int64 [B, (L)]; weight float32 [B], 0 for rows that must not count; None: all count."""
    return Batch(groups=row, input_ids=tokens, weights=torch.ones(len(row)) if weight is None else weight)


class ToyWorker:
    """Its methods answer with what arrived where."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.received: tuple[list[int], list[float]] = ([], [])

    @remote_method(Dispatch.ONE_TO_ALL)
    def coordinates(self) -> Coordinates:
        return Coordinates(
            rank=self.rank,
            dp_rank=self.rank // 2,
            dp_size=2,
            dp_collector=self.rank % 2 == 0,
            replica=3 - self.rank,
            num_replicas=4,
            replica_collector=True,
        )

    def _double(self, batch: Batch) -> Batch:
        self.received = (batch["groups"].tolist(), batch["weights"].tolist())
        tokens = ragged_from_lengths(batch.flat("input_ids") * 2, row_lengths(batch["input_ids"]))
        return toy(batch["groups"], tokens, torch.full((len(batch),), float(self.rank)))

    @remote_method(Dispatch.DP)
    def double(self, batch: Batch) -> Batch:
        """Tokens doubled, `weight` the rank that did it."""
        return self._double(batch)

    @remote_method(Dispatch.REPLICAS)
    def given(self, entries: dict[int, str], every: str) -> tuple[int, dict[int, str], str]:
        """The rank, and what it got."""
        return self.rank, entries, every

    @remote_method(Dispatch.DP)
    def describe(self, what: str, *, batch: Batch) -> dict | list | None:
        """A metrics dict, a plain list or None, all naming rank and rows."""
        answers = {"dict": {"rank": self.rank}, "list": [self.rank, *batch["groups"].tolist()], "none": None}
        return answers[what]

    @remote_method(Dispatch.ONE_TO_ALL)
    def last_received(self) -> tuple[list[int], list[float]]:
        """(row, weight) of the last batch this rank got."""
        return self.received

    @remote_method(Dispatch.RANK_ZERO)
    def environment(self, *names: str) -> list[str]:
        """Values of environment variables."""
        return [os.environ[name] for name in names]

    @remote_method(Dispatch.ONE_TO_ALL)
    def nap(self, seconds: float) -> int:
        """Sleep, then the rank."""
        time.sleep(seconds)
        return self.rank
