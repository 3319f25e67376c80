"""Roles on pools of their own, as users start them: the numbers of one process, at the same time, ending together."""

from __future__ import annotations

import json
import math
from pathlib import Path

import psutil
import pytest
from command_line import stopped_in
from safetensors.torch import load_file
from short_runs import ONE, WITHOUT_RAY

pytestmark = [pytest.mark.dist, pytest.mark.timeout(480)]

SPLIT = "configs/split_cpu.yaml"
SMALL = (
    *("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=4"),
    *("trainer.val_before_train=false", "trainer.test_freq=5040", "trainer.total_training_steps=2"),
)
TWO_RANKS = (*ONE, "pools.critic.nnodes=1", "pools.critic.n_gpus_per_node=1", "critic.pool=critic")
"""Of the demo: one for the critic, one for all else."""
THREE_RANKS = (
    *("trainer.n_gpus_per_node=1", "pools.critic.n_gpus_per_node=1", "pools.rollout.n_gpus_per_node=1"),
    *("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",),
    *("critic.megatron.pipeline_model_parallel_size=1",),
)
"""Of the split configuration: one for each pool."""
MEASURED = ("timing_s/", "perf/", "reshard/", "training/rollout_", "rollout_corr/log_ppl_diff")
"""Metrics of clocks, memory and transfers, and the difference between two engines, which is all rounding."""
SIX_DIGITS = 1e-5


def numbers(run) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in run.metrics().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in lines]


def answers(folder: Path) -> list[list[str]]:
    """The text of every sample of every step."""
    files = sorted(folder.iterdir(), key=lambda file: int(file.stem))
    return [[json.loads(line)["output"] for line in file.read_text().splitlines()] for file in files]


def intervals(run, name: str) -> list[tuple[float, float]]:
    ran = json.loads((run.run / "timeline.json").read_text())
    return [(one["start"], one["stop"]) for one in ran if one["name"] == name]


def overlap(run, first: str, second: str) -> float:
    """Seconds in which both phases ran."""
    pairs = [(a, b) for a in intervals(run, first) for b in intervals(run, second)]
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in pairs)


def scores_overlap(run) -> bool:
    """Whether in some step the critic's values overlap with the scores of the actor and then the reference, on other
    ranks. They wait for neither, but a pass takes 20 ms, so that a busy machine may begin one too late in every step of
    a run; where values waited, no run would have such a step.
    """
    scoring = zip(*(intervals(run, name) for name in ("old_log_prob", "ref", "values")), strict=True)
    return any(values[0] < reference[1] and actor[0] < values[1] for actor, reference, values in scoring)


@pytest.mark.parametrize(
    ("keys", "num_receivers"),
    [
        pytest.param((*THREE_RANKS, WITHOUT_RAY), 1, id="three"),
        pytest.param((), 2, id="six", marks=pytest.mark.exhaustive),
    ],
)
def test_several_pools_compute_what_one_process_does(command_line, tmp_path: Path, keys, num_receivers: int) -> None:
    """Three, or through Ray the six of configs/split_cpu.yaml: the same samples; log-probs, values, losses, gradient
    norms and weights to 1e-5; bytes at their bound; and what does not depend on each other overlaps.

    The whole model in one process is the other run. Would not catch what all layouts compute wrong; the references in
    tests/dist do.
    """
    split = command_line(*SMALL, *keys, f"trainer.rollout_data_dir={tmp_path / 'split'}", config=SPLIT)
    local = ("--local", "--collapse", f"trainer.rollout_data_dir={tmp_path / 'one'}")
    one = command_line(*SMALL, *keys, *local, config=SPLIT)
    assert split.wait() == 0, split.text()
    assert one.wait() == 0, one.text()
    assert split.left_over() == []

    assert answers(tmp_path / "split") == answers(tmp_path / "one")
    for ours, theirs in zip(numbers(split), numbers(one), strict=True):
        assert ours.keys() == theirs.keys()
        far = {
            name: (ours[name], theirs[name])
            for name in ours
            if not math.isclose(ours[name], theirs[name], rel_tol=SIX_DIGITS, abs_tol=1e-6)
        }
        assert not far
    weights = [load_file(run.run / "hf_model" / "model.safetensors") for run in (split, one)]
    for name, tensor in weights[1].items():
        if name.endswith("k_proj.bias"):
            continue  # attention does not depend on it: its gradient is rounding, which Adam makes steps of
        assert (weights[0][name] - tensor).norm() <= SIX_DIGITS * tensor.norm(), name

    summary = json.loads((split.run / "summary.json").read_text())
    received = summary["transition_bytes_received_per_rank"]
    assert (
        received == summary["transition_bytes_lower_bound_per_rank"]
        and len(received) == num_receivers
        and min(received) > 0
    )
    assert overlap(split, "update_actor", "update_critic") > 0
    timed = split
    for _ in range(3):
        if scores_overlap(timed):
            break
        timed = command_line(*SMALL, *keys, config=SPLIT)
        assert timed.wait() == 0, timed.text()
    assert scores_overlap(timed)
    assert (split.run / "timeline.png").stat().st_size > 10_000


@pytest.mark.exhaustive
def test_a_rank_of_one_pool_that_dies_ends_all_pools(command_line) -> None:
    """Killed in an update: one message with pool, rank, role and method. Would not catch a node that dies."""
    run = command_line(*SMALL, *TWO_RANKS, WITHOUT_RAY, "trainer.total_training_steps=50")
    caught: list[psutil.Process] = []
    # A look at all processes takes a good part of a core: not while the run starts.
    run.wait_for(lambda: '"step": 1' in run.metrics())
    run.wait_for(
        lambda: caught.extend(filter(None, [stopped_in(run.workers(), "critic.update")])) or caught, interval=0.005
    )
    rank = caught[0].name().split()[1]
    caught[0].kill()
    assert run.wait() == 3, run.text()
    assert f"pool critic, rank {rank} (critic): the process died during update" in run.text(), run.text()
    assert run.left_over() == []
