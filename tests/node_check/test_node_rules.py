"""The judge of nodes: sound reports, and reports with one planted fault each; no processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_rl.config.load import load_config
from megatron_rl.controller.run_setup import checks_nodes, node_rules
from megatron_rl.node_check.cuda_drivers import least_driver
from megatron_rl.node_check.node_facts import CUDA, DRIVER
from megatron_rl.node_check.node_report import (
    ACROSS,
    INSIDE,
    PAIR,
    GpuFacts,
    NodeFacts,
    NodeReport,
    PortFacts,
    RankFacts,
    ReduceReport,
)
from megatron_rl.node_check.node_rules import NodeRules, judge

GB = 10**9
RULES = NodeRules(True, {INSIDE: 45.0, ACROSS: 40.0, PAIR: 40.0}, {"global_pool": 70 * GB})
NAMES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
VERSIONS = {"python": "3.12.3", "torch": "2.13.0", "vllm": "0.32.0", "megatron-core": "0.16.1", "driver": "580.65"}


def node(name: str, first: int) -> NodeReport:
    """Two GPUs that NVLink joins, one InfiniBand port."""
    gpus = tuple(GpuFacts(str(index), f"GPU-{name}-{index}", "NVIDIA H100", 85 * GB, 84 * GB) for index in (0, 1))
    ports = (PortFacts("mlx5_0/1", True, 50.0),)
    facts = NodeFacts(dict(VERSIONS), gpus, {"GPU0-GPU1": "NV18"}, ports, True)
    ranks = tuple(RankFacts("global_pool", first + index, str(index), 1) for index in (0, 1))
    return NodeReport(name, facts, ranks, 0.01, 0.002)


NODES = [node(name, 2 * place) for place, name in enumerate(NAMES)]
REDUCES = [
    *(ReduceReport("global_pool", INSIDE, (name,), 300.0) for name in NAMES),
    ReduceReport("global_pool", ACROSS, NAMES, 80.0),
    *(ReduceReport("global_pool", PAIR, pair, 80.0) for pair in (NAMES[:2], NAMES[1:])),
]


def changed(place: int, **facts) -> list[NodeReport]:
    """The sound nodes, but for some facts of one."""
    nodes = list(NODES)
    nodes[place] = replace(nodes[place], facts=replace(nodes[place].facts, **facts))
    return nodes


def test_sound_nodes_have_no_findings():
    assert judge(NODES, REDUCES, RULES) == []


def gpu(index: int, **values) -> GpuFacts:
    return replace(NODES[1].facts.gpus[index], **values)


BLIND = [NODES[0], replace(NODES[1], ranks=(NODES[1].ranks[0], replace(NODES[1].ranks[1], num_gpus=0))), NODES[2]]
LATE = [NODES[0], replace(NODES[1], clock_s=-90.0), NODES[2]]
PLANTED = {
    "version": (changed(1, versions=VERSIONS | {"torch": "2.12.0"}), ("torch 2.12.0", "2.13.0 as on 10.0.0.1")),
    "driver": (changed(1, versions=VERSIONS | {"driver": "570.1"}), ("driver 570.1", "580.65")),
    "package missing": (
        changed(1, versions={name: text for name, text in VERSIONS.items() if name != "vllm"}),
        ("vllm none", "0.32.0"),
    ),
    "GPU missing": (
        changed(1, gpus=NODES[1].facts.gpus[:1]),
        ("the driver lists 1 GPUs", "2 are asked", "trainer.n_gpus_per_node=1"),
    ),
    "GPU not seen": (BLIND, ("lists 2 GPUs, and rank(s) 3 see none", "trainer.n_gpus_per_node=1")),
    "another GPU": (changed(1, gpus=(gpu(0, name="NVIDIA A100"), gpu(1, name="NVIDIA A100"))), ("kind of GPU", "A100")),
    "memory": (
        changed(1, gpus=(gpu(0), gpu(1, free_bytes=20 * GB))),
        ("GPU 1 (rank 3 of global_pool) has 20.00 GB free of 85.00 GB", "needs 70.00 GB"),
    ),
    "NVLink": (changed(1, links={"GPU0-GPU1": "SYS"}), ("joined by NVLink: 0 of 1", "1 of 1 as on 10.0.0.1")),
    "port down": (
        changed(1, ports=(PortFacts("mlx5_0/1", False, 1.25),)),
        ("active InfiniBand or RoCE ports: 0", "1 x 50 GB/s"),
    ),
    "library of InfiniBand": (changed(1, has_verbs=False), ("libibverbs is not found", "libibverbs1")),
    "clock": (LATE, ("90.0 s behind", "1 s at most")),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_named(fault):
    """With node, values, rule and what to do, and nothing else. Would not catch a fault in what nodes report."""
    nodes, words = PLANTED[fault]
    (found,) = judge(nodes, REDUCES, RULES)
    assert found.node == NAMES[1] and found.is_fault
    assert not [word for word in words if word not in str(found)], str(found)
    assert str(found).count("try: ") == 1 and found.nearest


def test_copies_for_repairs_have_room() -> None:
    """Of all pools with ranks on a node, on CPUs too. Would not catch what another program takes meanwhile."""
    nodes = changed(1, shared_bytes=64 << 20)
    rules = replace(RULES, on_gpus=False, least_shared_bytes={"global_pool": 40 * GB, "elsewhere": 70 * GB})
    (found,) = judge(nodes, REDUCES, rules)
    assert found.node == NAMES[1] and "/dev/shm has 0.07 GB free" in str(found) and "need 40.00 GB of it" in str(found)
    assert judge(changed(1, shared_bytes=40 * GB), REDUCES, rules) == []


@pytest.mark.parametrize(
    ("cuda", "driver", "least"),
    [
        ("13.0", "550.54.15", 580),
        ("13.0", "580.65", None),
        ("12.9", "550.54.15", None),
        ("12.4", "470.1", 525),
        ("none", "470.1", None),
        ("13.0", "none", None),
        ("99.0", "470.1", None),
    ],
)
def test_drivers_of_cuda(cuda: str, driver: str, least: int | None) -> None:
    """Of every node, though all are alike. Would not catch a newer CUDA, nor drivers with compatibility packages."""
    assert least_driver(cuda, driver) == least
    nodes = [replace(node, facts=replace(node.facts, versions={CUDA: cuda, DRIVER: driver})) for node in NODES]
    found = [str(finding) for finding in judge(nodes, REDUCES, RULES)]
    assert len(found) == (0 if least is None else 3)
    assert all(f"driver {driver}, and torch is built for CUDA {cuda}" in text for text in found)
    assert all(f"a driver of branch {least} or newer" in text for text in found)


def slow(kind: str, nodes: tuple[str, ...], rate: float) -> list[ReduceReport]:
    return [replace(one, gb_per_s=rate) if (one.kind, one.nodes) == (kind, nodes) else one for one in REDUCES]


@pytest.mark.parametrize(
    ("kind", "nodes", "key"),
    [
        (INSIDE, NAMES[1:2], "trainer.min_link_bandwidth_gbs=45"),
        (ACROSS, NAMES, "trainer.min_node_bandwidth_gbs=40"),
        (PAIR, NAMES[1:], "trainer.min_node_bandwidth_gbs=40"),
    ],
)
def test_a_slow_all_reduce_is_named(kind, nodes, key):
    """A value below what was measured is the nearest that works."""
    (found,) = judge(NODES, slow(kind, nodes, 10.0), RULES)
    assert found.node == " and ".join(nodes) and "moves 10 GB/s" in found.values
    assert key in found.rule and found.nearest.startswith(f"{key.partition('=')[0]}=9,")
    assert judge(NODES, slow(kind, nodes, 10.0), NodeRules(True)) == [], "without a floor"


def test_only_the_first_failure_is_named():
    """Later groups wait for ranks that have failed already."""
    failed = [replace(one, gb_per_s=None, failure="timed out") for one in REDUCES if one.kind != INSIDE]
    (found,) = judge(NODES, [*REDUCES[:3], *failed], RULES)
    assert found.node == " and ".join(NAMES) and "timed out" in found.values and ACROSS in found.values


def test_the_odd_node_of_three_is_found_first_or_not():
    """Most nodes decide; of two, the first."""
    nodes = changed(0, versions=VERSIONS | {"torch": "2.12.0"})
    assert [found.node for found in judge(nodes, [], RULES)] == [NAMES[0]]
    assert [found.node for found in judge(nodes[:2], [], RULES)] == [NAMES[1]]


def test_no_network_of_its_own_is_worth_a_look():
    """Not a fault: sockets work. Nothing is said of one node."""
    nodes = [replace(one, facts=replace(one.facts, ports=())) for one in NODES]
    (found,) = judge(nodes, REDUCES, RULES)
    assert not found.is_fault and "sockets" in found.rule
    assert judge(nodes[:1], REDUCES[:1], RULES) == []


def test_what_the_way_of_an_answer_explains_is_no_skew():
    """By hand: 3 s ahead, known to 2.5 s."""
    nodes = [NODES[0], replace(NODES[1], clock_s=3.0, clock_error_s=2.5), NODES[2]]
    assert judge(nodes, REDUCES, RULES) == []


def test_gpus_are_not_asked_for_on_a_cpu():
    """Would not catch that versions and clocks still are, which the tests over Ray do."""
    nodes = [replace(one, facts=NodeFacts(dict(VERSIONS))) for one in NODES]
    assert judge(nodes, REDUCES, NodeRules(False)) == []


DEMO, LARGE = "configs/demo_cpu.yaml", "configs/llama3_70b_ppo.yaml"


@pytest.mark.parametrize(
    ("file", "overrides", "checks"),
    [
        (LARGE, (), True),
        (LARGE, ("trainer.cluster_check=false",), False),
        (LARGE, ("trainer.nnodes=1",), False),
        (DEMO, ("trainer.nnodes=2",), False),
        (DEMO, ("trainer.cluster_check=true",), True),
    ],
)
def test_which_runs_check_their_nodes(file, overrides, checks):
    """By default those on GPUs of several nodes."""
    assert checks_nodes(load_config(file, list(overrides))) == checks


def test_node_rules_a_large_run(monkeypatch):
    """A tenth of 450 GB/s of a link, and of 50 GB/s for each of 8 GPUs; the plan's 66 GB, and 7 GB of
    CUDA's context, NCCL over nodes and captured graphs.

    Would not catch that a plan is wrong.
    """
    from megatron_rl.controller import run_setup

    planned = {"global_pool": {"init": {"x": 41 * GB}, "update": {"x": 60 * GB, "y": 6 * GB}}}
    monkeypatch.setattr(run_setup, "planned_memory", lambda config: planned)
    rules = node_rules(load_config(LARGE, []))
    assert rules.on_gpus and rules.floors == pytest.approx({INSIDE: 45.0, ACROSS: 40.0, PAIR: 40.0})
    assert rules.least_free_bytes == {"global_pool": 73 * GB}
    given = node_rules(load_config(LARGE, ["trainer.min_node_bandwidth_gbs=5"]))
    assert given.floors == pytest.approx({INSIDE: 45.0, ACROSS: 5.0, PAIR: 5.0})


def test_node_rules_a_run_on_cpus():
    """No floor but one that is given."""
    assert node_rules(load_config(DEMO, [])) == NodeRules(False)
    given = node_rules(load_config(DEMO, ["trainer.min_link_bandwidth_gbs=0.5"]))
    assert given == NodeRules(False, {INSIDE: 0.5})
