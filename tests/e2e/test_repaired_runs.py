"""Runs that lose ranks or nodes and repair themselves: the same bits as a run that was never hurt."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from command_line import CommandLine
from raylets import Raylets
from short_runs import CLOCKED, JUDGED, MEGATRON, ONE, SHORT, TP2, WITHOUT_RAY, metrics, reached, steps_saved
from sweeps import WEEKLY

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

KEYS = (*SHORT, "trainer.max_repairs=2", "trainer.export_hf=true")
TP1 = (f"{MEGATRON}.tensor_model_parallel_size=1", f"{MEGATRON}.pipeline_model_parallel_size=1")


def unclocked(lines: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """Metrics without those of repairs."""
    own = (*CLOCKED, "repair/")
    return {
        step: {name: value for name, value in line.items() if not name.startswith(own)} for step, line in lines.items()
    }


def weights(run: Path) -> bytes:
    return (run / "hf_model/model.safetensors").read_bytes()


def repairs(run: CommandLine) -> list[dict]:
    file = run.run / "repairs.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def rank_of(run: CommandLine, number: int):
    return next(process for process in run.workers() if process.name().split()[1] == str(number))


def test_a_killed_rank_is_started_anew(command_line, recorded) -> None:
    """Rank 1 of two is killed after two steps, without any checkpoint: the run goes on from the copies in memory, with
    the metrics and weights of a run that was never hurt, and nothing is left.
    """
    well = recorded("never_hurt", *SHORT, *TP2, WITHOUT_RAY)
    hurt = command_line(*KEYS, *TP2, WITHOUT_RAY)
    hurt.wait_for(reached(hurt, 2), interval=0.01)
    rank_of(hurt, 1).kill()
    assert hurt.wait() == 0, hurt.text()
    (repair,) = repairs(hurt)
    assert repair["source"] == "copy" and repair["step"] >= 1 and repair["steps_lost"] <= 1, repair
    assert "rank 1" in repair["reason"] and repair["reason"] in " ".join(hurt.text().split())
    assert json.loads((hurt.run / "summary.json").read_text())["repairs"][0]["reason"] == repair["reason"]
    assert unclocked(metrics(hurt)) == unclocked(metrics(well))
    assert weights(hurt.run) == weights(well.run)
    assert "Traceback" not in hurt.text() and hurt.left_over() == []


@pytest.mark.exhaustive
def test_a_killed_judge_is_started_anew(command_line) -> None:
    """It has a rank of its own, and judges responses while later ones are generated, as the timeline shows. Killed
    after two steps it comes back, and metrics, weights and the record of its verdicts are those of a run never hurt.
    """
    judged = (*ONE, WITHOUT_RAY, *JUDGED, "reward_model.pool=judge", "pools.judge.n_gpus_per_node=1")
    early = (
        "reward_model.launch_reward_fn_async=true",
        "async_training.slice_steps=1",
        "reward_model.judge.max_num_seqs=4",
    )
    well = command_line(*SHORT, *judged, *early, "actor_rollout_ref.rollout.max_num_seqs=16")
    assert well.wait() == 0, well.text()
    calls = json.loads((well.run / "timeline.json").read_text())
    judging, drawing = ([call for call in calls if call["name"] == name] for name in ("judge", "gen"))
    assert any(one["start"] < other["stop"] and other["start"] < one["stop"] for one in judging for other in drawing)
    hurt = command_line(*KEYS, *judged, *early, "actor_rollout_ref.rollout.max_num_seqs=16")
    hurt.wait_for(reached(hurt, 2), interval=0.01)
    next(rank for rank in hurt.workers() if "of judge" in "".join(rank.cmdline()[:1])).kill()
    assert hurt.wait() == 0, hurt.text()
    assert [repair["source"] for repair in repairs(hurt)] == ["copy"]
    assert unclocked(metrics(hurt)) == unclocked(metrics(well)) and weights(hurt.run) == weights(well.run)
    records = [(run.run / "judgements.jsonl").read_text() for run in (hurt, well)]
    assert records[0] == records[1] and "Traceback" not in hurt.text() and hurt.left_over() == []


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(("trainer.copy_freq=-1", "trainer.save_freq=2"), marks=pytest.mark.exhaustive),
        pytest.param(("trainer.copy_freq=-1",), marks=WEEKLY),
    ],
    ids=["checkpoint", "start"],
)
def test_without_copies_a_repair_goes_back(command_line, recorded, keys) -> None:
    """From the newest checkpoint, or the start; the bits are the same."""
    well = recorded("never_hurt", *SHORT, *TP2, WITHOUT_RAY)
    hurt = command_line(*KEYS, *TP2, WITHOUT_RAY, *keys)
    hurt.wait_for(reached(hurt, 3), interval=0.01)
    rank_of(hurt, 0).kill()
    assert hurt.wait() == 0, hurt.text()
    (repair,) = repairs(hurt)
    source, step = ("checkpoint", 2) if len(keys) == 2 else ("start", 0)
    assert repair["source"] == source and step <= repair["step"] < 4, repair
    assert unclocked(metrics(hurt)) == unclocked(metrics(well))
    assert weights(hurt.run) == weights(well.run) and hurt.left_over() == []


@pytest.mark.exhaustive
@pytest.mark.weekly
def test_a_hang_is_repaired_and_too_many_losses_end_a_run(command_line) -> None:
    """A stopped rank is noticed by its silence; with max_repairs=2 the third loss ends the run with code 3."""
    run = command_line(*KEYS, *TP2, WITHOUT_RAY, "trainer.heartbeat_timeout_s=10", "trainer.total_training_steps=1000")
    for number, sent in enumerate((signal.SIGSTOP, signal.SIGKILL, signal.SIGKILL)):
        run.wait_for(reached(run, 2 * number + 1), interval=0.01)
        rank_of(run, number % 2).send_signal(sent)
        if number < 2:
            run.wait_for(lambda number=number: f"repair {number + 1} of at most 2" in run.text())
            run.wait_for(lambda number=number: len(repairs(run)) == number + 1)
    assert run.wait() == 3, run.text()
    assert "trainer.max_repairs=2" in run.text() and "Traceback" not in run.text()
    assert run.left_over() == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", ["signal", "loss"])
def test_a_signal_beside_a_loss_saves_what_the_copy_has(command_line, first: str) -> None:
    """As where a scheduler ends a job: SIGTERM to the controller and the death of a rank, in either order. The run
    starts its ranks anew only to save, and ends with code 20 or 21; at most one step is lost.
    """
    run = command_line(*KEYS, *TP2, WITHOUT_RAY, "trainer.save_freq=1000", "trainer.total_training_steps=1000")
    run.wait_for(reached(run, 3), interval=0.01)
    rank = rank_of(run, 1)
    if first == "signal":
        run.process.send_signal(signal.SIGTERM)
        rank.kill()
    else:
        rank.kill()
        run.wait_for(lambda: "repair 1 of at most 2" in run.text(), interval=0.01)
        run.process.send_signal(signal.SIGTERM)
    assert run.wait() in (20, 21), run.text()
    assert steps_saved(run)[0] == max(metrics(run)) >= 2
    assert "Traceback" not in run.text() and run.left_over() == []


@pytest.mark.exhaustive
@pytest.mark.weekly
def test_a_run_ahead_replays_its_repair(command_line) -> None:
    """A training rank is killed while two replicas draw ahead; the replay of the schedule, its repair included, has
    the same metrics and weights.
    """
    keys = (*SHORT, WITHOUT_RAY, "trainer.max_repairs=2", "trainer.total_training_steps=4")
    hurt = command_line(*keys, config="configs/async_cpu.yaml")
    hurt.wait_for(reached(hurt, 2), interval=0.01)
    next(rank for rank in hurt.workers() if "rank 1 of global_pool" in "".join(rank.cmdline()[:1])).kill()
    assert hurt.wait() == 0, hurt.text()
    assert [repair["source"] for repair in repairs(hurt)] == ["copy"]
    again = command_line(*keys, "--replay", str(hurt.run), config="configs/async_cpu.yaml")
    assert again.wait() == 0, again.text()
    clocks = ("rollout/idle_share", "rollout/pause_s", "trainer/idle_share")
    ours, theirs = (
        {
            step: {name: value for name, value in line.items() if name not in clocks}
            for step, line in unclocked(metrics(run)).items()
        }
        for run in (hurt, again)
    )
    assert ours == theirs and weights(hurt.run) == weights(again.run)
    assert hurt.left_over() == [] and again.left_over() == []


@pytest.mark.exhaustive
def test_a_lost_node_is_replaced_by_a_spare(command_line, recorded) -> None:
    """PP2 over two Ray nodes, a third is free: the second node is lost at once with what it held; its state comes from
    the copy that the first one has. The same bits as on one machine.
    """
    layout = (f"{MEGATRON}.tensor_model_parallel_size=1", "trainer.nnodes=2", "trainer.n_gpus_per_node=1")
    with Raylets(1, 1) as cluster:
        well = command_line(*SHORT, *layout, variables=cluster.variables)
        assert well.wait() == 0, well.text()
        cluster.add_node(1)
        hurt = command_line(*KEYS, *layout, variables=cluster.variables)
        hurt.wait_for(reached(hurt, 2), interval=0.01)
        cluster.kill(next(node for node in (1, 2) if cluster.ranks(node)))
        assert hurt.wait() == 0, hurt.text()
        print(hurt.text())
        (repair,) = repairs(hurt)
        assert repair["source"] == "copy" and repair["steps_lost"] <= 1, repair
        assert unclocked(metrics(hurt)) == unclocked(metrics(well))
        assert weights(hurt.run) == weights(well.run)
        assert "Traceback" not in hurt.text() and hurt.left_over() == [] and cluster.left_over() == {}


@pytest.mark.exhaustive
@pytest.mark.weekly
def test_fewer_nodes_until_one_returns(command_line) -> None:
    """DP2 over two nodes loses one, and none is free: the run goes on with DP1, and with both once a node joins. The
    first step on one node and the last on two have the losses of a run that was never hurt, to rounding.
    """
    layout = (*TP1, "trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.total_training_steps=8")
    with Raylets(1, 1) as cluster:
        well = command_line(*SHORT, *layout, variables=cluster.variables)
        assert well.wait() == 0, well.text()
        hurt = command_line(*KEYS, *layout, "trainer.repair_wait_s=2", variables=cluster.variables)
        hurt.wait_for(reached(hurt, 2), interval=0.01)
        cluster.kill(1)
        hurt.wait_for(lambda: "continuing with trainer.nnodes=1" in hurt.text())
        cluster.add_node(1)
        assert hurt.wait() == 0, hurt.text()
        print(hurt.text())
        assert "nodes are back: continuing with trainer.nnodes=2" in hurt.text()
        (repair,) = repairs(hurt)
        assert repair["source"] == "copy" and repair["steps_lost"] <= 1, repair
        for step, line in unclocked(metrics(well)).items():
            for name in ("actor/pg_loss", "critic/vf_loss", "critic/score/mean", "actor/grad_norm"):
                assert metrics(hurt)[step][name] == pytest.approx(line[name], rel=1e-4, abs=1e-5), (step, name)
        assert hurt.left_over() == [] and cluster.left_over() == {}
