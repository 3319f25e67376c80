"""A node of a run over two is lost: all its processes at once, as in a power cut."""

from __future__ import annotations

import re
import time
from contextlib import suppress

import psutil
import pytest
from command_line import LIMIT, is_in
from raylets import Raylets
from short_runs import LOCAL, MEGATRON, SHORT, steps_saved

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive, pytest.mark.timeout(900)]

NOTICED_S = 60
"""A lost node must have ended the run by then."""
TP = f"{MEGATRON}.tensor_model_parallel_size"
PP2 = (2, 1, (f"{TP}=1",))
TP2PP2 = (2, 2, (f"{TP}=2",))
"""Nodes, ranks of each, and the layout on them."""
KEYS = (*SHORT, "trainer.save_freq=1", "trainer.export_hf=false", "trainer.total_training_steps=1000")

DIED = re.compile(
    r"WorkerFailure: rank (\d+) \(\w+\): the process died during (\w+)\. It was process \d+ on node (\S+); "
)


def lose_node_in(cluster: Raylets, node: int, run, method: str) -> list[int]:
    """Kill a node while the first of its ranks is in a method; its ranks."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        assert run.process.poll() is None, run.text()
        ranks = cluster.ranks(node)
        until = time.monotonic() + 5
        while ranks and time.monotonic() < until:
            with suppress(psutil.Error):  # a process that has just ended
                first = ranks[min(ranks)]
                if is_in(first, method):
                    first.suspend()
                    if is_in(first, method):
                        cluster.kill(node)
                        return sorted(ranks)
                    first.resume()
            time.sleep(0.001)
    raise AssertionError(f"no rank was seen in {method}: {run.text()}")


@pytest.mark.parametrize(
    ("layout", "moments"),
    [
        pytest.param(PP2, ("host.begin_save", "actor.update"), id="PP2"),
        pytest.param(TP2PP2, ("rollout.enter",), id="TP2xPP2"),
    ],
)
def test_a_lost_node_ends_the_run_and_the_next_start_goes_on(command_line, layout, moments) -> None:
    """One error that names a rank of the lost node and the method; nothing left on the others; then a node comes back.

    Each life but the last, which is in one process, loses a node: each of three Ray methods of a rank once, as a role's
    method comes after its name. The head stays: without it there is no cluster. Would not catch a node that is cut off
    from the network and lives on.
    """
    num_nodes, per_node, overrides = layout
    keys = (*KEYS, *overrides, f"trainer.nnodes={num_nodes}", f"trainer.n_gpus_per_node={per_node}")
    saved, folder = 0, None
    with Raylets(*[per_node] * num_nodes) as cluster:
        for doomed, method in enumerate(moments, start=num_nodes - 1):
            run = command_line(*keys, folder=folder, variables=cluster.variables)
            folder = run.folder
            newest = run.run / f"global_step_{saved + 1}"
            run.wait_for(newest.exists)
            lost = lose_node_in(cluster, doomed, run, method)
            lost_at = time.monotonic()
            code, text = run.wait(NOTICED_S), " ".join(run.text().split())
            print(f"{method}: ended {time.monotonic() - lost_at:.1f} s later\n{run.text()}")
            assert code == 3, text
            ((rank, during, address),) = DIED.findall(text)
            assert int(rank) in lost and method.endswith(during) and address == cluster.address(doomed), text
            assert "Traceback" not in text, text
            assert run.left_over() == [] and cluster.left_over() == {}
            assert not saved or f"resuming after step {saved}" in text
            saved = steps_saved(run)[0]
            if method != moments[-1]:
                cluster.add_node(per_node)
    last = command_line(*KEYS, *LOCAL, f"trainer.total_training_steps={saved + 1}", folder=folder)
    assert last.wait() == 0, last.text()
    assert f"resuming after step {saved}" in last.text() and steps_saved(last)[0] == saved + 1
