"""`kill -9` at random moments: what is called a checkpoint always is one, and the next life goes on from the newest."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from command_line import CommandLine
from lives import ONE, SHORT, metrics, steps_saved

from megatron_rl.checkpoint.folders import find

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

NUM_CHAINS, NUM_KILLS = 2, 10
KEYS = (*SHORT, *ONE, "trainer.save_freq=1", "trainer.max_ckpt_to_keep=2", "trainer.export_hf=false")
ASYNC = "actor_rollout_ref.actor.checkpoint.async_save"


def test_killed_at_random_moments(command_line, tmp_path: Path) -> None:
    """20 kills of the controller or the worker, half of them while a checkpoint is being written, in two runs at once.

    At the end each has the metrics of a run that was never killed. Would not catch what only a power cut loses.
    """
    folders = [tmp_path / name for name in ("saved-by-the-way", "saved-beside")]
    with ThreadPoolExecutor(NUM_CHAINS) as pool:
        chains = [
            pool.submit(live_and_die, command_line, folder, random.Random(seed), beside_training=bool(seed))
            for seed, folder in enumerate(folders)
        ]
        survivors = [chain.result() for chain in chains]
    num_steps = max(max(metrics(survivor)) for survivor in survivors)
    whole = command_line(*KEYS, f"trainer.total_training_steps={num_steps}")
    assert whole.wait(300) == 0, whole.text()
    expected = metrics(whole)
    for survivor in survivors:
        ours = metrics(survivor)
        last = max(ours)
        # The last step of a run is validated, which adds a metric.
        assert {step: ours[step] for step in ours if step < last} == {step: expected[step] for step in range(1, last)}


def live_and_die(command_line, folder: Path, chance: random.Random, beside_training: bool) -> CommandLine:
    """Kill a run NUM_KILLS times, then let it come to its end; its last life."""
    keys = (*KEYS, f"{ASYNC}={str(beside_training).lower()}")
    # A save beside training is complete one step later.
    most_lost = 2 if beside_training else 1
    saved: list[int] = []
    for number in range(NUM_KILLS):
        run = command_line(*keys, "trainer.total_training_steps=1000", folder=folder)
        wait_for_the_moment(run, chance, while_saving=number % 2 == 0)
        if saved:
            assert f"going on after step {saved[0]}," in run.text().replace("\n", " ")
        chance.choice([psutil.Process(run.process.pid), *run.workers()]).kill()
        assert run.wait(60) in (-9, 3), run.text()
        assert run.left_over(patience=60) == []
        before, saved = saved, steps_saved(run)
        assert 1 <= len(saved) <= 3
        assert saved[0] >= (before[0] if before else 0)
        assert saved[0] >= max(metrics(run)) - most_lost, "more than the steps since the last save were lost"
    last = command_line(*keys, f"trainer.total_training_steps={saved[0] + 2}", folder=folder)
    assert last.wait(180) == 0, last.text()
    assert steps_saved(last) == [saved[0] + 2, saved[0] + 1]
    return last


def newest_step(run: CommandLine) -> int:
    """By the names of the folders alone."""
    return max((found.step for found in find(run.run)), default=0)


def wait_for_the_moment(run: CommandLine, chance: random.Random, while_saving: bool) -> None:
    """Return some time after this life's first checkpoint, when the next one is being written or at any instant."""
    begun = newest_step(run)
    run.wait_for(lambda: newest_step(run) > begun, timeout=150)
    if while_saving:
        run.wait_for(lambda: any(run.run.glob("global_step_*.unfinished")), timeout=60, interval=0.002)
        time.sleep(chance.uniform(0, 0.3))
    else:
        time.sleep(chance.uniform(0, 1.5))
