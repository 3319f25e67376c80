"""Ranks of one machine, without Ray: the run's supervisor starts them, and pipes carry the calls."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from megatron_rl.cluster.launcher import VISIBLE_GPUS, Ranks
from megatron_rl.cluster.ranks import LOOPBACK
from megatron_rl.cluster.scratch import Scratch
from megatron_rl.cluster.supervisor_client import LocalRankProcess, SupervisorClient
from megatron_rl.config.roles import PoolSize
from megatron_rl.errors import ConfigError
from megatron_rl.remote_columns import RemoteColumn


class LocalLauncher:
    """Starts ranks on this machine. device_kind: "cpu" or "cuda"; on CUDA each rank gets a GPU of its own.

    modules, variables: see `SupervisorClient`.
    """

    may_grow = False

    def __init__(
        self, device_kind: str, modules: Sequence[str] = (), variables: Mapping[str, str] | None = None
    ) -> None:
        self._modules, self._variables = modules, dict(variables or {})
        self._free_gpus = visible_gpus() if device_kind == "cuda" else None
        self._left_out = list[str]()
        self._supervision: SupervisorClient

    def __enter__(self) -> Self:
        """Raises ConfigError if there is no place for the run's files."""
        self._supervision = SupervisorClient(Scratch.begin(), self._modules, self._variables, owns_run=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._supervision.end_run(error)

    @property
    def scratch(self) -> Scratch:
        """The run's scratch folder; the launcher must have been entered."""
        return self._supervision.scratch

    @property
    def is_lost(self) -> bool:
        """Never: a supervisor that is gone shows when a rank is started."""
        return False

    def shortage(self, sizes: Sequence[PoolSize]) -> str:
        """Return "", unless GPUs that are left out are needed."""
        needed, free = sum(size.num_ranks_per_node for size in sizes), self._free_gpus
        if free is None or not self._left_out or needed <= len(free):
            return ""
        without = ", ".join(self._left_out)
        return f"the run needs {needed} GPUs of this machine, which has {len(free)} without GPU {without}"

    def leave_out(self, node: str, gpu: str) -> None:
        """Give a GPU to no rank from now on."""
        if self._free_gpus is not None and gpu in self._free_gpus:
            self._free_gpus.remove(gpu)
            self._left_out.append(gpu)

    def take_back(self) -> None:
        """Give ranks the GPUs again that were left out."""
        if self._free_gpus is not None:
            self._free_gpus += self._left_out
        self._left_out.clear()

    def hold_nodes(self) -> None:
        """Do nothing: this process holds the run's folder here."""

    def segments(self) -> dict[str, list[str]]:
        """Return this node -> names of the run's segments."""
        return {socket.gethostname(): self.scratch.segments()}

    @contextmanager
    def reserve(self, size: PoolSize, others: Sequence[PoolSize] = ()) -> Iterator[LocalRanks]:
        """Reserve ranks. Raises ConfigError for a second node, and where there are too few GPUs for all pools."""
        ranks = self.ask(size)
        try:
            yield ranks
        finally:
            ranks.give_back()

    def ask(self, size: PoolSize) -> LocalRanks:
        """Take ranks, which are there at once. Raises ConfigError as `reserve`."""
        if size.num_nodes > 1:
            raise ConfigError(
                f"{size.nodes_key}={size.num_nodes} with trainer.launcher=local, which starts ranks on this machine "
                f"alone; try: {size.nodes_key}=1, or trainer.launcher=ray"
            )
        world_size, free = size.num_ranks_per_node, self._free_gpus
        if free is not None and len(free) < world_size:
            raise ConfigError(
                f"{size.ranks_key}={world_size}, and {len(free)} GPUs of this machine are left for it; "
                f"try: {size.ranks_key}={max(1, len(free))}, or trainer.launcher=ray on more machines"
            )
        ranks = LocalRanks(world_size, self._supervision, free)
        ranks.ask()
        return ranks


class LocalRanks(Ranks):
    """Ranks on this machine. free_gpus: of which `ask` takes one for each rank, from the front; None: on CPUs."""

    def __init__(self, world_size: int, supervision: SupervisorClient, free_gpus: list[str] | None) -> None:
        super().__init__(world_size, world_size, 0, world_size)
        self._supervision, self._free_gpus = supervision, free_gpus
        self._gpus: list[str] = []

    def device_index(self, rank: int) -> int:
        return rank if self._free_gpus is None else 0

    def start(self, rank: int, variables: Mapping[str, str]) -> LocalRankProcess:
        host = socket.gethostname()
        return self._supervision.start(variables, host, host, self._gpus[rank] if self._gpus else "")

    def ask(self) -> None:
        if self._free_gpus is not None:
            self._gpus, self._free_gpus[: self.world_size] = self._free_gpus[: self.world_size], []

    @property
    def is_given(self) -> bool:
        return self._free_gpus is None or bool(self._gpus)

    def give_back(self) -> None:
        if self._free_gpus is not None:
            self._free_gpus[:0], self._gpus = self._gpus, []

    def share(self, message: bytes, held: Sequence[RemoteColumn] = ()) -> bytes:
        return message

    @property
    def address(self) -> str:
        return LOOPBACK

    @property
    def is_lost(self) -> bool:
        return False

    @property
    def run_id(self) -> str:
        return self._supervision.scratch.run_id


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, in the form of CUDA_VISIBLE_DEVICES; no GPU is touched."""
    named = os.environ.get(VISIBLE_GPUS)
    if named is not None:
        return [name for name in named.split(",") if name]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
