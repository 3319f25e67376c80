"""The check with processes on this machine, without Ray: what it says, and what it raises."""

from __future__ import annotations

import re
from contextlib import ExitStack

import pytest
from launchers import LOCAL, make_launcher, reserved

from megatron_rl.cluster.pool_options import PoolOptions
from megatron_rl.errors import ConfigError
from megatron_rl.node_check.cluster_check import NodeCheck
from megatron_rl.node_check.node_report import INSIDE
from megatron_rl.node_check.node_rules import NodeRules

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]


def check(rules: NodeRules, variables: dict[str, str] | None = None, pools: tuple[int, ...] = (2,)) -> list[str]:
    """What is said of pools of so many ranks each. variables: of every rank."""
    said: list[str] = []
    with make_launcher(LOCAL, ("megatron_rl.node_check.cluster_check",)) as launcher, ExitStack() as opened:
        ranks = {f"pool{number}": opened.enter_context(reserved(launcher, size)) for number, size in enumerate(pools)}
        NodeCheck(rules, "cpu", PoolOptions(env=variables or {}), said.append)(ranks)
    return said


def test_two_pools_of_one_machine() -> None:
    """One node with all ranks, an all-reduce of each pool, and none where a pool has one rank."""
    node, reduced, end = check(NodeRules(False), pools=(2, 1))
    assert re.match(r"node \S+: 3 ranks; clock [+-]\d", node)
    assert re.match(rf"all-reduce {INSIDE}, pool0, \S+: [\d.]+ GB/s$", reduced)
    assert end.startswith("1 node(s) checked in ")


def test_a_floor_above_what_is_measured() -> None:
    """With the key to change, and a value that works."""
    with pytest.raises(ConfigError, match=r"trainer\.min_link_bandwidth_gbs=1e\+06 or more; try: trainer\.min_link"):
        check(NodeRules(False, {INSIDE: 1e6}))


def test_ranks_that_cannot_meet() -> None:
    """Over a network that is not there. Would not catch a firewall that lets some through."""
    with pytest.raises(ConfigError, match="all-reduce inside a node failed: .*nowhere0.*; ranks of a run must reach"):
        check(NodeRules(False), {"GLOO_SOCKET_IFNAME": "nowhere0"})
