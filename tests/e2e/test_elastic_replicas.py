"""Replicas that join and leave while a run goes on: nothing is lost, and the schedule replays bit for bit."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest
from command_line import CommandLine
from raylets import Raylets
from short_runs import SHORT, WITHOUT_RAY, metrics, reached
from test_repaired_runs import unclocked, weights

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive, pytest.mark.timeout(600)]

ASYNC = "configs/async_cpu.yaml"
ROLLOUT = "actor_rollout_ref.rollout"
KEYS = (*SHORT, f"{ROLLOUT}.min_replicas=1", f"{ROLLOUT}.drain_s=1")
WAITED = ("rollout/idle_share", "rollout/pause_s", "rollout/replicas", "trainer/idle_share")
"""Metrics of who waited for whom, and of who was there, which a replay does not repeat."""


SLOW = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.1)
    return float(solution_str == ground_truth)
"""


def replica(run: CommandLine, number: int):
    """The process of a replica of one rank, or None."""
    title = f"rank 0 of rollout_pool/{number}"
    return next((rank for rank in run.workers() if title in "".join(rank.cmdline()[:1])), None)


def repeated(run: CommandLine) -> dict[int, dict[str, float]]:
    """The metrics that a replay repeats."""
    return {
        step: {name: value for name, value in line.items() if not name.startswith(WAITED)}
        for step, line in unclocked(metrics(run)).items()
    }


def check_replay(command_line, run: CommandLine, *keys: str) -> None:
    """All samples are those of a pool in which every replica is there from the start."""
    again = command_line(*keys, "--replay", str(run.run), config=ASYNC)
    assert again.wait(timeout=3000) == 0, again.text()
    assert repeated(again) == repeated(run) and weights(again.run) == weights(run.run)


def test_replicas_leave_on_notices_and_come_back(command_line) -> None:
    """A line of the file `drain`, SIGTERM to a process, and a kill: each replica comes back, no token is lost, and a
    replay in which all are there has the same samples and weights.
    """
    keys = (*KEYS, WITHOUT_RAY, f"{ROLLOUT}.max_replicas=3", "trainer.total_training_steps=200")
    run = command_line(*keys, "trainer.save_freq=5", "trainer.max_ckpt_to_keep=1", config=ASYNC)
    run.wait_for(reached(run, 2))
    (run.run / "drain").write_text("1 # by an operator\n")
    run.wait_for(lambda: "rollout_pool/1 leaves" in run.text() and replica(run, 1) is None)
    (run.run / "drain").unlink()
    run.wait_for(lambda: "rollout_pool/1 joins" in run.text())
    replica(run, 0).terminate()
    run.wait_for(lambda: "rollout_pool/0 leaves, others continue: its process was given SIGTERM" in run.text())
    run.wait_for(lambda: "rollout_pool/0 joins" in run.text() and replica(run, 2) is not None)
    replica(run, 2).kill()
    run.wait_for(lambda: "rollout_pool/2 failed and starts again" in run.text())
    run.wait_for(lambda: "rollout_pool/2 joins" in run.text())
    run.wait_for(lambda: last(run)["rollout/replicas"] == 3)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 20, run.text()
    assert sum(line["rollout/forgotten_tokens"] for line in metrics(run).values()) == 0
    assert (last(run)["rollout/replicas_left"], last(run)["rollout/replicas_lost"]) == (2, 1)
    newest = json.loads(run.metrics().splitlines()[-1])
    assert newest["step"] - 2 <= newest["perf/rollout_version"] <= newest["step"], newest
    assert "Traceback" not in run.text() and run.left_over() == []


def last(run: CommandLine) -> dict[str, float]:
    """The metrics of the last step."""
    return list(metrics(run).values())[-1]


def changes(run: CommandLine) -> int:
    """How often a replica has left or joined."""
    return run.text().count(" leaves, others continue") + run.text().count(" joins")


@pytest.mark.parametrize("num_changes", [12, pytest.param(200, marks=[pytest.mark.weekly, pytest.mark.timeout(3600)])])
def test_random_joins_and_leaves(command_line, num_changes: int) -> None:
    """Four replicas leave and join at drawn moments: no token is lost, and a replay in which all are there has the same
    metrics and weights.
    """
    keys = (*KEYS, WITHOUT_RAY, f"{ROLLOUT}.max_replicas=4", "trainer.export_hf=true")
    steps = f"trainer.total_training_steps={12 + 5 * num_changes // 2}"
    run = command_line(*keys, steps, config=ASYNC)
    draw, named = random.Random(num_changes), set[int]()
    run.wait_for(reached(run, 1))
    while run.process.poll() is None and changes(run) < num_changes:
        named ^= {draw.randrange(4)}
        if len(named) < 4:
            (run.run / "drain").write_text("".join(f"{number}\n" for number in sorted(named)))
        # Counted in steps, so that there are enough of them on every machine.
        later = len(metrics(run)) + draw.randrange(2)
        run.wait_for(lambda later=later: len(metrics(run)) >= later or run.process.poll() is not None, may_end=True)
        time.sleep(draw.uniform(0, 0.3))
    (run.run / "drain").write_text("")
    assert run.wait(timeout=3000) == 0, run.text()
    text = run.text()
    print(text.count(" leaves, others continue"), "left,", text.count(" joins"), "joined")
    assert changes(run) >= num_changes, "the run ended before; more steps are needed"
    assert sum(line["rollout/forgotten_tokens"] for line in metrics(run).values()) == 0
    assert last(run)["rollout/replicas_lost"] == 0
    assert "Traceback" not in text and run.left_over() == []
    check_replay(command_line, run, *keys, steps)


def test_a_node_that_joins_brings_a_replica(command_line, tmp_path: Path) -> None:
    """On a Ray cluster: a run begins with the one replica that there is room for, another joins with a node and is lost
    with it, and the last one comes with a third node, which a notice then takes away. Steps wait for rewards, as
    nodes take their time, and more steps meanwhile prove nothing.
    """
    (tmp_path / "slow.py").write_text(SLOW)
    keys = (*KEYS, f"{ROLLOUT}.max_replicas=2", "trainer.total_training_steps=1000", "trainer.save_freq=1")
    keys = (*keys, f"custom_reward_function.path={tmp_path / 'slow.py'}")
    keys = (*keys, "trainer.max_ckpt_to_keep=1", "trainer.save_best=false")
    with Raylets(3) as cluster:
        run = command_line(*keys, config=ASYNC, variables=cluster.variables)
        run.wait_for(reached(run, 2))
        assert " joins" not in run.text() and last(run)["rollout/replicas"] == 1
        cluster.add_node(1)
        run.wait_for(lambda: " joins" in run.text() and last(run)["rollout/replicas"] == 2)
        (rank,) = cluster.ranks(1)
        assert rank == 0
        cluster.kill(1)
        run.wait_for(lambda: "failed and starts again" in run.text() and last(run)["rollout/replicas"] == 1)
        cluster.add_node(1)
        run.wait_for(lambda: run.text().count(" joins") == 2 and last(run)["rollout/replicas"] == 2)
        (run.run / "drain").write_text(f"{cluster.address(2)}\n")
        run.wait_for(lambda: f"names {cluster.address(2)}" in run.text() and last(run)["rollout/replicas"] == 1)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 20, run.text()
        assert "Traceback" not in run.text() and run.left_over() == [] and cluster.left_over() == {}


def test_too_few_replicas_end_a_run(command_line) -> None:
    """All replicas are to leave: after trainer.repair_wait_s the run ends with code 3 and says what is missing."""
    run = command_line(*KEYS, WITHOUT_RAY, "trainer.repair_wait_s=2", "trainer.total_training_steps=1000", config=ASYNC)
    run.wait_for(reached(run, 1))
    (run.run / "drain").write_text("0\n1\n")
    assert run.wait() == 3, run.text()
    assert "0 rollout replicas were left for trainer.repair_wait_s=2 s" in " ".join(run.text().split())
    assert f"{ROLLOUT}.min_replicas=1" in run.text()
    assert "Traceback" not in run.text() and run.left_over() == []
