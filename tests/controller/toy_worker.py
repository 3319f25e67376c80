"""A worker small enough to see through, on 4 ranks as dp=2 x tp=2; its rollout replicas run against the rank order."""

from __future__ import annotations

import os
import subprocess
import threading
import time

import torch
from tensordict import TensorClass

from megatron_rl.dispatch import Coordinates, Dispatch, register
from megatron_rl.errors import ConfigError


class Toy(TensorClass):
    """row int64 [B]; tokens int64 [B, (L)]; weight float32 [B], 0 for rows that must not count."""

    row: torch.Tensor
    tokens: torch.Tensor
    weight: torch.Tensor

    def neutral(self) -> Toy:
        return Toy(self.row, self.tokens, torch.zeros_like(self.weight), batch_size=self.batch_size)


class ToyWorker:
    """Its verbs answer with what arrived where, or fail in every way a worker can."""

    def __init__(self, unlucky_rank: int = -1) -> None:
        self.rank = int(os.environ["RANK"])
        self.received: tuple[list[int], list[float]] = ([], [])
        if self.rank == unlucky_rank:
            raise ConfigError("tp(3) does not divide num_heads(8)")

    @register(Dispatch.ONE_TO_ALL, role="toy")
    def coordinates(self) -> Coordinates:
        num_ranks = int(os.environ["WORLD_SIZE"])
        return Coordinates(
            rank=self.rank,
            dp_rank=self.rank // 2,
            dp_size=(num_ranks + 1) // 2,
            dp_collector=self.rank % 2 == 0,
            replica=num_ranks - 1 - self.rank,
            num_replicas=num_ranks,
            replica_collector=True,
        )

    def _double(self, batch: Toy) -> Toy:
        self.received = (batch.row.tolist(), batch.weight.tolist())
        tokens = torch.nested.nested_tensor_from_jagged(batch.tokens.values() * 2, batch.tokens.offsets())
        return Toy(batch.row, tokens, torch.full((len(batch),), float(self.rank)), batch_size=batch.batch_size)

    @register(Dispatch.DP, role="toy")
    def double(self, batch: Toy) -> Toy:
        """Tokens doubled, `weight` the rank that did it."""
        return self._double(batch)

    @register(Dispatch.ROLLOUT_DP, role="toy")
    def double_by_replica(self, batch: Toy) -> Toy:
        """As `double`."""
        return self._double(batch)

    @register(Dispatch.DP, role="toy")
    def describe(self, what: str, *, batch: Toy) -> dict | list | None:
        """A metrics dict, a plain list or None, all naming rank and rows."""
        answers = {"dict": {"rank": self.rank}, "list": [self.rank, *batch.row.tolist()], "none": None}
        return answers[what]

    @register(Dispatch.ONE_TO_ALL, role="toy")
    def last_received(self) -> tuple[list[int], list[float]]:
        """(row, weight) of the last batch this rank got."""
        return self.received

    @register(Dispatch.RANK_ZERO, role="toy")
    def environment(self, *names: str) -> list[str]:
        """Values of environment variables."""
        return [os.environ[name] for name in names]

    @register(Dispatch.ONE_TO_ALL, role="toy")
    def nap(self, seconds: float) -> int:
        """Sleep, then the rank."""
        time.sleep(seconds)
        return self.rank

    @register(Dispatch.ONE_TO_ALL, role="actor")
    def divide_by_zero_on(self, unlucky_rank: int) -> float:
        """Fails on one rank; the others lose their peer a moment earlier, as a skewed clock would show it."""
        if self.rank == unlucky_rank:
            time.sleep(0.3)
            return 1 / 0
        raise RuntimeError("[gloo] Connection closed by peer [10.0.0.1]:4711")

    @register(Dispatch.RANK_ZERO, role="actor")
    def answer_with_lock(self) -> object:
        """An answer that cannot be pickled."""
        return threading.Lock()

    @register(Dispatch.ONE_TO_ALL, role="actor")
    def barrier_all_but(self, absent_rank: int) -> None:
        """Everybody enters a gloo barrier except one, who never comes."""
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        if self.rank == absent_rank:
            time.sleep(600)
        torch.distributed.barrier()

    @register(Dispatch.ONE_TO_ALL, role="toy")
    def start_child(self) -> int:
        """A child process of the worker, as a checkpoint writer would be; its pid."""
        return subprocess.Popen(["sleep", "600"]).pid


class FailsToUnpickle:
    """A constructor argument whose module cannot be imported on the ranks."""

    def __reduce__(self) -> tuple:
        return _import_missing_module, ()


def _import_missing_module() -> None:
    raise ImportError("no module named 'missing_on_the_worker'")
