"""`kill -9` of whole runs: what is called a checkpoint always is one, and the next life goes on from the newest.

That every instant of the protocol is safe, and every torn write noticed, is proven without runs, one operation after
the other, in tests/checkpoint/test_every_instant.py. What is left to real runs: that the controller and the ranks keep
to that protocol, that no process outlives the one that was killed, and that the metrics are those of a run that was
never killed. `make test` has one kill, in test_resumed_runs.py; these are `exhaustive`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from command_line import CommandLine
from short_runs import LOCAL, ONE, SHORT, WITHOUT_RAY, metrics, steps_saved

from megatron_rl.checkpoint.folders import find

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive, pytest.mark.timeout(1500)]

MANY_KILLS = 4
"""Of runs in one process, whose lives cost little."""
KEYS = (*SHORT, "trainer.save_freq=1", "trainer.max_ckpt_to_keep=2", "trainer.export_hf=false")
ASYNC = "actor_rollout_ref.actor.checkpoint.async_save"
Kill = Callable[[CommandLine], None]
RANK = (*ONE, WITHOUT_RAY)
RAYS_RANK = ONE


def test_killed_while_saving(command_line, tmp_path: Path) -> None:
    """A rank that Ray started, while a checkpoint is being written beside training, then the controller of one that it
    did not: metrics as if never killed.

    Would not catch what happens at other moments; see above.
    """

    def kill_a_rank(run: CommandLine) -> None:
        wait_until_it_saves(run)
        [rank] = run.workers()
        rank.kill()

    def kill_the_controller(run: CommandLine) -> None:
        wait_until_it_saves(run)
        run.process.kill()

    kills = [(kill_a_rank, RAYS_RANK), (kill_the_controller, RANK)]
    last = live_and_die(command_line, tmp_path / "run", kills, beside_training=True)
    assert_never_killed(command_line, [last])


def test_killed_at_random_moments(command_line, tmp_path: Path) -> None:
    """Kills of the controller or the worker, half of them while a checkpoint is being written, in two runs at once: one
    with a rank of its own, once through Ray, saved by the way, and one in one process, saved beside training.

    At the end each has the metrics of a run that was never killed. Would not catch what only a power cut loses.
    """
    kinds = [(False, [RANK, RAYS_RANK]), (True, [LOCAL] * MANY_KILLS)]
    with ThreadPoolExecutor(len(kinds)) as pool:
        chains = [
            pool.submit(live_and_die, command_line, tmp_path / str(seed), random_kills(seed, layouts), beside)
            for seed, (beside, layouts) in enumerate(kinds)
        ]
        survivors = [chain.result() for chain in chains]
    assert_never_killed(command_line, survivors)


def random_kills(seed: int, layouts: list[tuple[str, ...]]) -> list[tuple[Kill, tuple[str, ...]]]:
    """With the layout of each life. Of the controller or the worker, when the next checkpoint is being written or at
    any instant, in turns.
    """
    chance = random.Random(seed)

    def kill(run: CommandLine, while_saving: bool) -> None:
        wait_for_the_moment(run, chance, while_saving)
        chance.choice([psutil.Process(run.process.pid), *run.workers()]).kill()

    return [
        (lambda run, number=number: kill(run, while_saving=number % 2 == 0), layout)
        for number, layout in enumerate(layouts)
    ]


def live_and_die(
    command_line, folder: Path, kills: list[tuple[Kill, tuple[str, ...]]], beside_training: bool
) -> CommandLine:
    """Let each of `kills` end one life of a run, then let it come to its end in one process; its last life."""
    keys = (*KEYS, f"{ASYNC}={str(beside_training).lower()}")
    # A save beside training is complete one step later.
    most_lost = 2 if beside_training else 1
    saved: list[int] = []
    for kill, layout in kills:
        run = command_line(*keys, *layout, "trainer.total_training_steps=1000", folder=folder)
        kill(run)
        if saved:
            assert f"resuming after step {saved[0]}," in run.text().replace("\n", " ")
        assert run.wait() in (-9, 3), run.text()
        assert run.left_over() == []
        before, saved = saved, steps_saved(run)
        assert 1 <= len(saved) <= 3
        assert saved[0] >= (before[0] if before else 0)
        assert saved[0] >= max(metrics(run)) - most_lost, "more than the steps since the last save were lost"
    last = command_line(*keys, *LOCAL, f"trainer.total_training_steps={saved[0] + 2}", folder=folder)
    assert last.wait() == 0, last.text()
    assert steps_saved(last) == [saved[0] + 2, saved[0] + 1]
    return last


def assert_never_killed(command_line, survivors: list[CommandLine]) -> None:
    """All metrics are those of a run of as many steps, in one process, that was never killed."""
    num_steps = max(max(metrics(survivor)) for survivor in survivors)
    whole = command_line(*KEYS, *LOCAL, f"trainer.total_training_steps={num_steps}")
    assert whole.wait() == 0, whole.text()
    expected = metrics(whole)
    for survivor in survivors:
        ours = metrics(survivor)
        last = max(ours)
        # The last step of a run is validated, which adds a metric.
        assert {step: ours[step] for step in ours if step < last} == {step: expected[step] for step in range(1, last)}


def newest_step(run: CommandLine) -> int:
    """By the names of the folders alone."""
    return max((found.step for found in find(run.run)), default=0)


def wait_until_it_saves(run: CommandLine) -> None:
    """Return while the second checkpoint of this life, or a later one, is being written."""
    begun = newest_step(run)
    run.wait_for(lambda: newest_step(run) > begun)
    run.wait_for(lambda: any(run.run.glob("global_step_*.unfinished")), interval=0.002)


def wait_for_the_moment(run: CommandLine, chance: random.Random, while_saving: bool) -> None:
    """Return some time after this life's first checkpoint, when the next one is being written or at any instant."""
    if while_saving:
        wait_until_it_saves(run)
        time.sleep(chance.uniform(0, 0.3))
    else:
        begun = newest_step(run)
        run.wait_for(lambda: newest_step(run) > begun)
        time.sleep(chance.uniform(0, 1.5))
