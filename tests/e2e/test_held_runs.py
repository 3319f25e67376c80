"""Runs whose ranks hold every column that ranks alone read: the bits of a run whose columns pass through the driver."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import CommandLine, stopped_in
from short_runs import MEGATRON, WITHOUT_RAY, metrics
from sweeps import WEEKLY
from test_distillation_runs import CONFIG, FEW, KINDS, STUDENT, data_of, other, teacher, two_sources
from test_router_replay_run import ACTOR, GRPO
from test_router_replay_run import SHORT as ROUTED
from test_several_nodes import tiny_moe

pytestmark = [pytest.mark.dist, pytest.mark.timeout(480)]
__all__ = ["other", "two_sources"]

HELD, PASSED = "trainer.held_bytes=1", "trainer.held_bytes=null"
DP2 = ("trainer.n_gpus_per_node=2", *(f"{MEGATRON}.{axis}_model_parallel_size=1" for axis in ("tensor", "pipeline")))


def holds(run: CommandLine) -> bool:
    """Whether a rank of the run holds a column now."""
    if not run.run_ids:
        run.family()
    return any("-held-" in path for path in run.files())


def without_memory(run: CommandLine) -> dict[int, dict[str, float]]:
    """Its metrics but for clocks, and for bytes of processes."""
    return {
        step: {name: value for name, value in line.items() if not name.startswith("memory/")}
        for step, line in metrics(run).items()
    }


def assert_alike(command_line, *keys: str, config: str) -> None:
    run = command_line(*keys, HELD, config=config)
    run.wait_for(lambda: holds(run), interval=0.02)
    assert run.wait() == 0, run.text()
    assert run.left_over() == []
    whole = command_line(*keys, PASSED, config=config)
    assert whole.wait() == 0, whole.text()
    assert without_memory(run) == without_memory(whole)


def test_two_teachers_of_a_run_on_two_ranks(command_line, other: Path, two_sources: Path) -> None:  # noqa: F811
    """Hidden states of two teachers, put together and balanced over two data-parallel ranks, in several mini-batches
    and epochs. Would not catch a launcher's own way; tests/cluster/test_remote_column_pools.py has both.
    """
    both = (*teacher(other, key="small"), *teacher(STUDENT, "student", key="large"))
    keys = (*FEW, *KINDS["forward_kl"], *both, *data_of(two_sources), *DP2, WITHOUT_RAY)
    assert_alike(command_line, *keys, config=CONFIG)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("log_probs_at", marks=pytest.mark.exhaustive),
        pytest.param("R3", marks=pytest.mark.exhaustive),
        pytest.param("R2", marks=WEEKLY),
    ],
)
def test_other_columns(command_line, other: Path, case: str, tmp_path: Path) -> None:  # noqa: F811
    """What the student names and its teacher answers; experts of engine and routers. Would not catch a column that is
    not held at all, where another one is.
    """
    if case != "log_probs_at":
        model = (f"actor_rollout_ref.model.path={tiny_moe(tmp_path / 'model')}", f"{ACTOR}.router_replay.mode={case}")
        assert_alike(command_line, *ROUTED, *DP2, *model, WITHOUT_RAY, config=GRPO)
    else:
        keys = (*FEW, *KINDS["reverse_kl_topk"], *teacher(other), *DP2, WITHOUT_RAY)
        assert_alike(command_line, *keys, config=CONFIG)


def test_a_rank_that_is_killed_while_columns_are_held(command_line, other: Path) -> None:  # noqa: F811
    """In the actor's update: exit code 3, and no file is left. Would not catch a rank that dies while it writes."""
    many = "trainer.total_training_steps=1000"
    run = command_line(*FEW, many, *KINDS["forward_kl"], *teacher(other), *DP2, WITHOUT_RAY, HELD, config=CONFIG)
    killed = []

    def is_updating() -> bool:
        killed[:] = [rank for rank in [stopped_in(run.workers(), "actor.update")] if rank is not None]
        return bool(killed)

    run.wait_for(is_updating, interval=0.02)
    assert holds(run)
    killed[0].kill()
    assert run.wait() == 3, run.text()
    assert run.left_over() == []
