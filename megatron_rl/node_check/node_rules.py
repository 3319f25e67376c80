"""Judge what a check has learnt of nodes: a pure function from reports to findings. No torch, no Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.errors import shown
from megatron_rl.node_check.cuda_drivers import least_driver, newer_driver
from megatron_rl.node_check.node_facts import CUDA, DRIVER
from megatron_rl.node_check.node_report import ACROSS, INSIDE, KINDS, PAIR, NodeReport, ReduceReport

LINK_FLOOR, NODE_FLOOR = "trainer.min_link_bandwidth_gbs", "trainer.min_node_bandwidth_gbs"
FLOORS = {INSIDE: LINK_FLOOR, ACROSS: NODE_FLOOR, PAIR: NODE_FLOOR}
"""Kind of an all-reduce -> the key of its floor."""
SLOW = {
    INSIDE: "see how its GPUs are connected (`nvidia-smi topo -m`) and what else runs there",
    **dict.fromkeys(
        (ACROSS, PAIR), "see whether NCCL goes over sockets (NCCL_DEBUG=INFO) and what else is on the network"
    ),
}
"""What to look at where one is too slow."""
MOST_CLOCK_SKEW_S = 1.0
"""Times in timelines, logs and files of two nodes are compared with each other."""
NVLINK = "NV"


@dataclass(frozen=True)
class NodeRules:
    """What nodes must fulfil.

    on_gpus: GPUs, NVLink, InfiniBand and free memory are looked at. floors: kind of an all-reduce -> GB/s that it must
    reach; a kind without a floor is measured alone. least_free_bytes: pool -> bytes that each of its GPUs must have
    free. least_shared_bytes: pool -> bytes that it needs of /dev/shm on each of its nodes.
    """

    on_gpus: bool
    floors: Mapping[str, float] = field(default_factory=dict)
    least_free_bytes: Mapping[str, int] = field(default_factory=dict)
    least_shared_bytes: Mapping[str, int] = field(default_factory=dict)
    most_clock_skew_s: float = MOST_CLOCK_SKEW_S


@dataclass(frozen=True)
class Finding:
    """Something about a node. values: what was found. rule: what must hold. nearest: what to do.

    is_fault: the nodes cannot be used as they are; otherwise it is worth a look.
    """

    node: str
    values: str
    rule: str
    nearest: str
    is_fault: bool = True

    def __str__(self) -> str:
        return f"node {self.node}: {self.values}; {self.rule}; try: {self.nearest}"


def judge(nodes: Sequence[NodeReport], reduces: Sequence[ReduceReport], rules: NodeRules) -> list[Finding]:
    """Return everything that is wrong, or worth a look, node by node within each rule."""
    findings = [*_versions(nodes), *_clocks(nodes, rules), *_shared(nodes, rules), *_reduces(reduces, rules)]
    if rules.on_gpus:
        findings[0:0] = [*_gpus(nodes), *_drivers(nodes), *_memory(nodes, rules), *_links(nodes), *_ports(nodes)]
    return findings


def _versions(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    names = dict.fromkeys(name for node in nodes for name in node.facts.versions)
    for name in names:
        yield from _unlike(nodes, name, [node.facts.versions.get(name, "none") for node in nodes])


def _unlike(nodes: Sequence[NodeReport], what: str, values: Sequence[str], nearest: str = "") -> Iterator[Finding]:
    """Find the nodes that have another value than most; among equals the first node's counts."""
    usual = Counter(values).most_common(1)[0][0] if values else ""
    holder = next((node.name for node, value in zip(nodes, values, strict=True) if value == usual), "")
    for node, value in zip(nodes, values, strict=True):
        if value != usual:
            yield Finding(
                node.name,
                f"{what} {value}",
                f"must be that of the other nodes, {usual} as on {holder}",
                nearest or f"{what} {usual} on {node.name}, or leave it out of the cluster",
            )


def _gpus(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    kinds = [" and ".join(sorted({gpu.name for gpu in node.facts.gpus})) or "none" for node in nodes]
    yield from _unlike(nodes, "kind of GPU", kinds)
    for node in nodes:
        listed, asked = len(node.facts.gpus), len(node.ranks)
        blind = [str(rank.rank) for rank in node.ranks if not rank.num_gpus]
        if listed < asked or blind:
            unseen = f", and rank(s) {', '.join(blind)} see none" if blind else ""
            yield Finding(
                node.name,
                f"the driver lists {listed} GPUs{unseen}",
                f"{asked} are asked of this node, one for each rank",
                f"trainer.n_gpus_per_node={listed - len(blind) if listed > len(blind) else 1}, or `nvidia-smi` and "
                "`dmesg` there: a GPU may have fallen off the bus, or Ray was started with more than there are",
            )


def _drivers(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    for node in nodes:
        cuda, driver = (node.facts.versions.get(name, "") for name in (CUDA, DRIVER))
        if (least := least_driver(cuda, driver)) is not None:
            yield Finding(
                node.name,
                f"driver {driver}, and torch is built for CUDA {cuda}",
                f"CUDA {cuda} needs a driver of branch {least} or newer",
                newer_driver(cuda, least),
            )


def _memory(nodes: Sequence[NodeReport], rules: NodeRules) -> Iterator[Finding]:
    for node in nodes:
        for rank in node.ranks:
            needed = rules.least_free_bytes.get(rank.pool, 0)
            for gpu in node.gpus_of(rank):
                if gpu.free_bytes < needed:
                    yield Finding(
                        node.name,
                        f"GPU {gpu.index} (rank {rank.rank} of {rank.pool}) has {_gb(gpu.free_bytes)} free of "
                        f"{_gb(gpu.total_bytes)}",
                        f"the plan needs {_gb(needed)} of it",
                        f"end what else is on it (`nvidia-smi` there), or a layout that needs "
                        f"{_gb(gpu.free_bytes)} (`megatron-rl plan`)",
                    )


def _shared(nodes: Sequence[NodeReport], rules: NodeRules) -> Iterator[Finding]:
    for node in nodes:
        needed = sum(rules.least_shared_bytes.get(pool, 0) for pool in {rank.pool for rank in node.ranks})
        free = node.facts.shared_bytes
        if free is not None and free < needed:
            yield Finding(
                node.name,
                f"/dev/shm has {_gb(free)} free",
                f"copies for repairs (trainer.max_repairs) need {_gb(needed)} of it",
                "docker run --shm-size=, or an emptyDir with medium: Memory; or trainer.copy_freq=-1, with which a "
                "repair begins from a checkpoint",
            )


def _links(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    def joined_by_nvlink(node: NodeReport) -> str:
        links = node.facts.links.values()
        return f"{sum(link.startswith(NVLINK) for link in links)} of {len(links)}"

    nearest = "`nvidia-smi topo -m` and `nvidia-smi nvlink --status` there"
    yield from _unlike(nodes, "pairs of GPUs joined by NVLink:", list(map(joined_by_nvlink, nodes)), nearest)


def _ports(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    nearest = "`ibstat` there: a cable, a switch or the subnet manager"
    yield from _unlike(nodes, "active InfiniBand or RoCE ports:", list(map(_active, nodes)), nearest)
    for node in nodes:
        if node.facts.ports and not node.facts.has_verbs:
            yield Finding(
                node.name,
                "libibverbs is not found",
                f"NCCL needs it for {len(node.facts.ports)} InfiniBand or RoCE port(s), and else goes over sockets",
                "apt-get install libibverbs1 librdmacm1 ibverbs-providers",
                is_fault=len(nodes) > 1,
            )
    if len(nodes) > 1 and not any(node.facts.ports for node in nodes):
        yield Finding(
            nodes[0].name,
            "no node has InfiniBand or RoCE",
            "all that goes between nodes goes over sockets",
            "NCCL_SOCKET_IFNAME of the fastest network, where Ray's address is in another",
            is_fault=False,
        )


def _active(node: NodeReport) -> str:
    rates = Counter(port.gb_per_s for port in node.facts.ports if port.is_active)
    return " and ".join(f"{count} x {shown(rate)} GB/s" for rate, count in sorted(rates.items())) or "0"


def _clocks(nodes: Sequence[NodeReport], rules: NodeRules) -> Iterator[Finding]:
    """Offsets are those to one clock; what the way of question and reply may explain does not count."""
    for node in nodes:
        if abs(node.clock_s) - node.clock_error_s > rules.most_clock_skew_s:
            yield Finding(
                node.name,
                f"its clock is {abs(node.clock_s):.1f} s {'ahead of' if node.clock_s > 0 else 'behind'} that of the "
                "machine which starts the run",
                f"may differ by {rules.most_clock_skew_s:g} s at most",
                f"`chronyc makestep` or ntpd on {node.name}",
            )


def _reduces(reduces: Sequence[ReduceReport], rules: NodeRules) -> Iterator[Finding]:
    """Report only what fails first, because later groups wait for ranks that have failed."""
    failed = [report for report in reduces if report.gb_per_s is None]
    first = min((KINDS.index(report.kind) for report in failed), default=None)
    for report in failed:
        if KINDS.index(report.kind) == first:
            yield Finding(
                " and ".join(report.nodes),
                f"the all-reduce {report.kind} failed: {report.failure}",
                "ranks of a run must reach each other",
                "a firewall or the wrong interface between them (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), or "
                "NCCL_DEBUG=INFO to see more",
            )
    for report in reduces:
        floor = rules.floors.get(report.kind)
        if report.gb_per_s is None or floor is None or report.gb_per_s >= floor:
            continue
        yield Finding(
            " and ".join(report.nodes),
            f"the all-reduce {report.kind} moves {report.gb_per_s:.3g} GB/s",
            f"must move {FLOORS[report.kind]}={shown(floor)} or more",
            f"{FLOORS[report.kind]}={report.gb_per_s * 0.9:.2g}, or {SLOW[report.kind]}",
        )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def listing(nodes: Sequence[NodeReport], reduces: Sequence[ReduceReport]) -> list[str]:
    """Lines that say what was found, whatever it is worth."""
    lines = []
    for node in nodes:
        versions = ", ".join(f"{name} {version}" for name, version in node.facts.versions.items())
        gpus = f"; {len(node.facts.gpus)} GPUs" if node.facts.gpus else ""
        clock = f"clock {node.clock_s * 1e3:+.1f} ms (+-{node.clock_error_s * 1e3:.1f})"
        lines.append(f"node {node.name}: {len(node.ranks)} ranks{gpus}; {clock}; {versions}")
    for report in reduces:
        rate = "failed" if report.gb_per_s is None else f"{report.gb_per_s:.3g} GB/s"
        lines.append(f"all-reduce {report.kind}, {report.pool}, {' and '.join(report.nodes)}: {rate}")
    return lines
