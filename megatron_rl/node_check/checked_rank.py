"""One rank of a pool whose nodes are checked: it says what it sees, and times all-reduces."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_rl.device import Device, settled_seconds
from megatron_rl.dispatch import Coordinates, Dispatch, remote_method
from megatron_rl.node_check.node_facts import node_facts
from megatron_rl.node_check.node_report import MeasuredReduce, NodeFacts, groups_of
from megatron_rl.roles.environment import RankEnvironment
from megatron_rl.roles.rendezvous import open_store

TIMEOUT = timedelta(seconds=60)
"""Longest wait for other ranks in a collective."""
NUM_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
"""Bytes of an all-reduce, by device. So many that the time of a message without content does not matter."""
REPEATS = 5
BLOCKING = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
"""NCCL then raises in the waiting thread after `TIMEOUT`, where otherwise the process is ended."""


class CheckedRank:
    """A host (see `ProcessPool`) without roles. It joins the other ranks in `reduce` alone. kind: "cpu" or "cuda"."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._environment = RankEnvironment.read()

    @remote_method(Dispatch.ONE_TO_ALL)
    def coordinates(self) -> Coordinates:
        """Return this rank's place, in a world without a layout."""
        rank = self._environment.rank
        return Coordinates(rank, 0, 1, rank == 0, 0, 1, rank == 0)

    @remote_method(Dispatch.ONE_TO_ALL)
    def facts(self, of_node: Sequence[int]) -> tuple[NodeFacts | None, int | None]:
        """Return the facts of this rank's node if it is one of the ranks in `of_node`, and the number of GPUs that it
        sees, None on a CPU. No GPU is touched.
        """
        on_gpus = self._kind == "cuda"
        facts = node_facts(on_gpus) if self._environment.rank in of_node else None
        return facts, torch.cuda.device_count() if on_gpus else None

    @remote_method(Dispatch.ONE_TO_ALL)
    def clock(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    @remote_method(Dispatch.ONE_TO_ALL)
    def reduce(self, nodes: Sequence[str]) -> list[MeasuredReduce]:
        """Time the all-reduces of `groups_of(nodes)` that this rank is in; all ranks of the pool must call.

        nodes: that of each rank. After a failure the rest fails for the same reason.
        """
        rank, failure = self._environment.rank, ""
        measured = []
        for kind, ranks in groups_of(nodes):
            if rank not in ranks:
                continue
            rate = None
            try:
                if not failure:
                    self._join()
                    rate = self._timed(ranks)
            except RuntimeError as error:  # torch's for whatever keeps ranks apart
                failure = (str(error).strip().splitlines() or [type(error).__name__])[0]
            measured.append(MeasuredReduce(kind, ranks, rate, failure))
        return measured

    def _join(self) -> None:
        """Join the other ranks, once."""
        if dist.is_initialized():
            return
        environment = self._environment
        environment.choose_interfaces()
        device = Device(self._kind, environment.local_rank)
        device.activate()
        store = open_store(environment, TIMEOUT)
        dist.init_process_group(
            device.backend, store=store, rank=environment.rank, world_size=environment.world_size, timeout=TIMEOUT
        )

    def _timed(self, ranks: Sequence[int]) -> float:
        """Return GB/s that a ring sends out of this rank: 2 (n - 1) / n times the bytes, by the median of REPEATS."""
        device = Device(self._kind, self._environment.local_rank)
        backend = device.backends[device.kind]
        group = dist.new_group(list(ranks), TIMEOUT, backend, use_local_synchronization=True)
        values = torch.zeros(NUM_BYTES[self._kind] // 4, device=device.torch_device)
        seconds = []
        for _ in range(1 + REPEATS):
            dist.all_reduce(values[:1], group=group)  # so that all begin together
            start = settled_seconds(device.torch_device)
            dist.all_reduce(values, group=group)
            seconds.append(settled_seconds(device.torch_device) - start)
        sent = 2 * (len(ranks) - 1) / len(ranks) * values.nbytes
        return sent / statistics.median(seconds[1:]) / 1e9
