"""What a check learns of nodes, as plain data. No torch, no Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

INSIDE, ACROSS, PAIR = "inside a node", "between all nodes", "between two nodes"
"""Kinds of all-reduces, in the order in which they are run."""
KINDS = (INSIDE, ACROSS, PAIR)


@dataclass(frozen=True)
class GpuFacts:
    """One GPU as the driver lists it; bytes."""

    index: str
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class PortFacts:
    """One port of an InfiniBand or RoCE adapter. name: adapter/port. gb_per_s: its rate, 0 where it has none."""

    name: str
    is_active: bool
    gb_per_s: float


@dataclass(frozen=True)
class NodeFacts:
    """What one process finds on its node.

    versions: of packages, Python and the driver; "none" where there is none. gpus: all that the driver lists. links:
    pair of GPUs, "GPU0-GPU1" -> how they are connected, in nvidia-smi's words ("NV18", "SYS"). ports: InfiniBand or
    RoCE. has_verbs: whether the library is found that NCCL needs to use them. gpu_fault: why nvidia-smi gave no reply.
    shared_bytes: free ones of /dev/shm; None without it.
    """

    versions: Mapping[str, str]
    gpus: tuple[GpuFacts, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[PortFacts, ...] = ()
    has_verbs: bool = False
    gpu_fault: str = ""
    shared_bytes: int | None = None


@dataclass(frozen=True)
class RankFacts:
    """One rank of a run on its node. gpus: what it may see, as in CUDA_VISIBLE_DEVICES. num_gpus: what torch finds of
    them; None on a CPU.
    """

    pool: str
    rank: int
    gpus: str = ""
    num_gpus: int | None = None


@dataclass(frozen=True)
class NodeReport:
    """A node of a run. name: its address. ranks: those that the run has reserved on it, of all pools.

    clock_s: seconds that its clock is ahead of the clock of the machine that asks, give or take clock_error_s.
    """

    name: str
    facts: NodeFacts
    ranks: tuple[RankFacts, ...]
    clock_s: float = 0.0
    clock_error_s: float = 0.0

    def gpus_of(self, rank: RankFacts) -> list[GpuFacts]:
        """Return the listed GPUs that a rank may see."""
        named = rank.gpus.split(",")
        return [gpu for gpu in self.facts.gpus if gpu.index in named or gpu.uuid in named]


@dataclass(frozen=True)
class MeasuredReduce:
    """One all-reduce as one rank has timed it. ranks: of its group. gb_per_s: bytes that a ring sends out of a rank,
    a second; None where it failed, for the reason in `failure`.
    """

    kind: str
    ranks: tuple[int, ...]
    gb_per_s: float | None
    failure: str = ""


@dataclass(frozen=True)
class ReduceReport:
    """All-reduces of one kind over the same nodes of a pool at the same time. gb_per_s: inside a node of its slowest
    rank, between nodes of a node: the sum over its ranks. None where one failed.
    """

    pool: str
    kind: str
    nodes: tuple[str, ...]
    gb_per_s: float | None
    failure: str = ""


def joined(pool: str, nodes: Sequence[str], measured: Iterable[MeasuredReduce]) -> list[ReduceReport]:
    """Join what the ranks of a pool have timed. nodes: that of each rank.

    A group is as fast as its slowest rank; groups between the same nodes ran at the same time, so their rates add up.
    """
    groups: dict[tuple[str, tuple[int, ...]], list[MeasuredReduce]] = {}
    for one in measured:
        groups.setdefault((one.kind, one.ranks), []).append(one)
    over: dict[tuple[str, tuple[str, ...]], list[list[MeasuredReduce]]] = {}
    for (kind, ranks), timed in groups.items():
        over.setdefault((kind, tuple(dict.fromkeys(nodes[rank] for rank in ranks))), []).append(timed)
    reports = []
    for (kind, places), lanes in over.items():
        failures = [one.failure for timed in lanes for one in timed if one.gb_per_s is None]
        slowest = [min(one.gb_per_s or 0.0 for one in timed) for timed in lanes]
        rate = None if failures else sum(slowest)
        reports.append(ReduceReport(pool, kind, places, rate, next(iter(failures), "")))
    return sorted(reports, key=lambda report: KINDS.index(report.kind))


def groups_of(nodes: Sequence[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Return kind and ranks of the all-reduces of a pool, in the order in which each rank runs those that it is in.

    nodes: that of each rank. Ranks of one node together; then the ranks with the same place on all nodes; then those
    of two neighbouring nodes, in rounds in which each node has one neighbour. Groups of one rank are left out.
    """
    members: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    places, num_lanes = list(members.values()), min(map(len, members.values()), default=0)
    groups = [(INSIDE, tuple(ranks)) for ranks in places]
    groups += [(ACROSS, tuple(ranks[lane] for ranks in places)) for lane in range(num_lanes)]
    for pairs in neighbour_rounds(len(places)):
        groups += [
            (PAIR, (places[left][lane], places[right][lane])) for left, right in pairs for lane in range(num_lanes)
        ]
    return [(kind, ranks) for kind, ranks in groups if len(ranks) > 1]


def neighbour_rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs in which every node meets both neighbours in a ring once, and one at a time.

    Empty for less than three nodes, where a pair is all there is.
    """
    if num_nodes < 3:
        return []
    ring = [(node, (node + 1) % num_nodes) for node in range(num_nodes)]
    closing = [ring.pop()] if num_nodes % 2 else []
    return [each for each in (ring[0::2], ring[1::2], closing) if each]
