"""Check the nodes of reserved ranks before anything is built on them: every rank's host, and what starts it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_rl.cluster.failures import FailureDomain
from megatron_rl.cluster.launcher import ProcessInfo, Ranks
from megatron_rl.cluster.pool import ProcessPool
from megatron_rl.cluster.pool_options import PoolOptions
from megatron_rl.cluster.waiting import get_all
from megatron_rl.config.problems import raise_problems
from megatron_rl.device import Device, settled_seconds
from megatron_rl.dispatch import Coordinates, Dispatch, remote_method
from megatron_rl.errors import Violation
from megatron_rl.node_check.node_facts import node_facts
from megatron_rl.node_check.node_report import (
    ACROSS,
    MeasuredReduce,
    NodeFacts,
    NodeReport,
    RankFacts,
    ReduceReport,
    groups_of,
    joined,
)
from megatron_rl.node_check.node_rules import NodeRules, judge, listing
from megatron_rl.roles.environment import RankEnvironment
from megatron_rl.roles.nccl_variables import BLOCKING_WAIT
from megatron_rl.roles.rendezvous import open_store

TIMEOUT = timedelta(seconds=60)
"""Longest wait for other ranks in a collective."""
NUM_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
"""Bytes of an all-reduce, by device. So many that the time of a message without content does not matter."""
REPEATS = 5
BLOCKING = {BLOCKING_WAIT: "1"}
"""NCCL then raises in the waiting thread after `TIMEOUT`, where otherwise the process is ended."""
CLOCK_ROUNDS = 5
REDUCE_LIMIT_S = 420.0
"""Seconds for the all-reduces of a pool: several times what one rank waits for another."""


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


@dataclass(frozen=True)
class NodeCheck:
    """A check of nodes, to be called with the reservations of all pools. device_kind: "cpu" or "cuda".

    options: environment and GPUs of the run's own ranks. say: takes a line for people. Every rank starts a process of
    its own, which has ended when the check returns.
    """

    rules: NodeRules
    device_kind: str
    options: PoolOptions
    say: Callable[[str], None]

    def __call__(self, ranks: Mapping[str, Ranks]) -> None:
        """Raise ConfigError with all faults, if there are any. Raises WorkerFailure where a process dies meanwhile."""
        start = time.monotonic()
        nodes, reduces = self.reports(ranks)
        findings = judge(nodes, reduces, self.rules)
        for line in listing(nodes, reduces):
            self.say(line)
        for finding in findings:
            if not finding.is_fault:
                self.say(f"note: {finding}")
        faults = [Violation({}, str(finding)) for finding in findings if finding.is_fault]
        raise_problems("the nodes cannot hold this run", faults, "faults")
        self.say(f"{len(nodes)} node(s) checked in {time.monotonic() - start:.0f} s: nothing wrong")

    def reports(self, ranks: Mapping[str, Ranks]) -> tuple[list[NodeReport], list[ReduceReport]]:
        """Start a process on every rank, ask, and end them all."""
        options = PoolOptions(env={**self.options.env, **BLOCKING}, sees_node=self.options.sees_node)
        with ExitStack() as opened:
            domain, numbered = FailureDomain(named=len(ranks) > 1), list[ProcessInfo]()
            pools = {
                name: ProcessPool(name, places, CheckedRank, self.device_kind, options=options, failure_domain=domain)
                for name, places in ranks.items()
            }
            for pool in pools.values():
                opened.callback(pool.shutdown)
                pool.spawn()
            processes = {name: pool.wait_for_processes() for name, pool in pools.items()}
            numbered += [process for of_pool in processes.values() for process in of_pool]
            get_all([pool.begin(numbered) for pool in pools.values()])
            seen = Seen()
            for name, pool in pools.items():
                seen.ask(name, pool.host(CheckedRank), processes[name])
            nodes = seen.reports()
            # One pool after the other: pools on the same nodes share their network.
            reduces = [
                report
                for name, pool in pools.items()
                for report in reduced(name, pool.host(CheckedRank), [process.host for process in processes[name]])
            ]
            return nodes, reduces


@dataclass
class Seen:
    """What processes have said of their nodes: node id -> it, in the order of first ranks. here: the driver's node."""

    names: dict[str, str] = field(default_factory=dict)
    facts: dict[str, NodeFacts] = field(default_factory=dict)
    ranks: dict[str, list[RankFacts]] = field(default_factory=dict)
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)
    here: set[str] = field(default_factory=set)

    def ask(self, pool: str, host: CheckedRank, processes: Sequence[ProcessInfo]) -> None:
        """Ask the ranks of a pool; a node that was asked before is asked for its ranks alone."""
        ids = [process.node_id for process in processes]
        self.here |= {process.node_id for process in processes if process.is_local}
        fresh = {node: ids.index(node) for node in ids if node not in self.facts}
        for rank, (facts, num_gpus) in enumerate(host.facts(sorted(fresh.values())).get()):
            node, process = ids[rank], processes[rank]
            self.names.setdefault(node, process.host)
            self.ranks.setdefault(node, []).append(RankFacts(pool, rank, process.gpus, num_gpus))
            if facts is not None:
                self.facts[node] = facts
        for _ in range(CLOCK_ROUNDS if fresh else 0):
            before = time.time()
            answers = host.clock().get()
            middle, error = (before + time.time()) / 2, (time.time() - before) / 2
            for node, rank in fresh.items():
                if node not in self.clocks or error < self.clocks[node][1]:
                    self.clocks[node] = answers[rank] - middle, error

    def reports(self) -> list[NodeReport]:
        """Return the reports of all nodes, the driver's first: of two that differ, it counts."""
        return [
            NodeReport(self.names[node], self.facts[node], tuple(self.ranks[node]), *self.clocks[node])
            for node in sorted(self.names, key=lambda node: node not in self.here)
        ]


def reduced(pool: str, host: CheckedRank, nodes: Sequence[str]) -> list[ReduceReport]:
    """Time the all-reduces of a pool. nodes: that of each rank."""
    if len(nodes) == 1:
        return []
    try:
        measured = host.reduce(nodes).get(REDUCE_LIMIT_S)
    except TimeoutError:
        places = tuple(dict.fromkeys(nodes))
        return [ReduceReport(pool, ACROSS, places, None, f"it has not ended after {REDUCE_LIMIT_S:g} s")]
    return joined(pool, nodes, [one for of_rank in measured for one in of_rank])
