"""The check of nodes over two Ray nodes on this machine: what it says, and what it does to a run."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from raylets import Raylets

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

PLANTED = "MEGATRON_RL_TEST_PLANTED"
PLANT = f"""
import os, sys
if "{PLANTED}" in os.environ:
    sys.path.insert(0, os.environ["{PLANTED}"])
"""
"""Python runs it at its start. Only where the variable names a folder, packages are looked for there first."""
TWO_NODES = (
    "trainer.nnodes=2",
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
)
RATE, ADDRESS = r"[\d.e+-]+ GB/s", r"[\d.]+"
"""By which Ray knows the head depends on the machine."""


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Path:
    """A folder with another version of torch, which the second node alone is shown, and what shows it."""
    folder = tmp_path_factory.mktemp("planted")
    record = folder / "other" / "torch-2.12.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.0\n")
    (folder / "sitecustomize.py").write_text(PLANT)
    return folder


@pytest.fixture(scope="module")
def cluster(planted) -> Iterator[Raylets]:
    with Raylets(2) as nodes:
        nodes.add_node(2, {PLANTED: str(planted / "other")})
        yield nodes


CHECK = (sys.executable, "-m", "megatron_rl", "check-cluster", "--config", "configs/demo_cpu.yaml")


def test_sound_nodes_pass(cluster, command_line):
    """Both nodes, their versions and clocks, an all-reduce in each and one between them.

    Would not catch what only a real network does.
    """
    run = command_line(*TWO_NODES, command=CHECK, variables=cluster.variables, names_folder=False)
    assert run.wait() == 0, run.text()
    text = run.text()
    nodes = re.findall(rf"^node ({ADDRESS}): 2 ranks; clock [+-][\d.]+ ms .*torch 2\.13\.0", text, re.M)
    assert len(set(nodes)) == 2 and nodes[1] == cluster.address(1), text
    inside = re.findall(rf"^all-reduce inside a node, global_pool, ({ADDRESS}): {RATE}$", text, re.M)
    assert sorted(inside) == sorted(nodes), text
    between = rf"^all-reduce between all nodes, global_pool, ({ADDRESS}) and ({ADDRESS}): {RATE}$"
    assert sorted(*re.findall(between, text, re.M)) == sorted(nodes), text
    assert "2 node(s) checked in" in text and text.rstrip().endswith("nothing wrong")
    assert cluster.left_over() == {} and run.left_over() == []


def test_planted_faults_end_a_run_before_roles_are_built(cluster, command_line, planted):
    """Another version on the second node, and a floor above what this machine moves: both are named, code 2, and no
    role was built. Would not catch a version that only a library's own code shows.
    """
    floor = "trainer.min_node_bandwidth_gbs=1000000"
    variables = cluster.variables | {"PYTHONPATH": str(planted)}
    train = (sys.executable, "-m", "megatron_rl", "train", "--config", "configs/demo_cpu.yaml")
    run = command_line(*TWO_NODES, "trainer.cluster_check=true", floor, command=train, variables=variables)
    assert run.wait() == 2, run.text()
    text = run.text()
    assert "ConfigError: the nodes cannot hold this run: 2 faults" in text
    theirs = r"must be that of the other nodes, 2\.13\.0(\+cpu)?"
    version = rf"node {re.escape(cluster.address(1))}: torch 2\.12\.0; {theirs}"
    assert re.search(rf"1\. {version} as on {ADDRESS}; try: ", text), text
    slow = rf"2\. node {ADDRESS} and {ADDRESS}: the all-reduce between all nodes moves {RATE}; must move"
    assert re.search(rf"{slow} trainer\.min_node_bandwidth_gbs=1e\+06 or more; try: ", text), text
    assert "Traceback" not in text and run.metrics() == ""
    assert cluster.left_over() == {} and run.left_over() == []


@pytest.mark.exhaustive
def test_a_verdict_as_json(cluster, command_line):
    """Lines of both nodes, and a floor above what this machine moves as a fault. Would not catch a fault of a GPU."""
    floor = "trainer.min_node_bandwidth_gbs=1000000"
    run = command_line(*TWO_NODES, floor, "--json", command=CHECK, variables=cluster.variables, names_folder=False)
    assert run.wait() == 2, run.text()
    said = json.loads(run.text()[run.text().index("{\n") : run.text().rindex("}") + 1])
    assert not said["fits"] and len([line for line in said["lines"] if line.startswith("node ")]) == 2
    assert len(said["faults"]) == 1 and "min_node_bandwidth_gbs=1e+06" in said["faults"][0]


@pytest.mark.exhaustive
def test_a_run_on_sound_nodes_goes_on(cluster, command_line):
    """On the ranks that were checked: one step. Would not catch a check that leaves memory behind on GPUs."""
    few = (
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        "trainer.export_hf=false",
    )
    run = command_line(*TWO_NODES, "trainer.cluster_check=true", *few, variables=cluster.variables)
    assert run.wait() == 0, run.text()
    assert "2 node(s) checked in" in run.text() and len(run.metrics().splitlines()) == 1
    assert cluster.left_over() == {}
