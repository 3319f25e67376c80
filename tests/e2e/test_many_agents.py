"""Whole runs with hundreds of agents, and with a driver, a keeper or a worker that is killed under them."""

from __future__ import annotations

import json
import sys

import psutil
import pytest
from command_line import CommandLine
from short_runs import WITHOUT_RAY, metrics
from test_agent_runs import FILE, GRPO, SHORT, TURNS, agent

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900), pytest.mark.exhaustive]

RAY = "trainer.launcher=ray"
ONE_RANK = (
    *("trainer.n_gpus_per_node=1", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1"),
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1",
)


def keeper(run: CommandLine) -> psutil.Process | None:
    """The keeper of a run, once its workers are there."""
    found = [each for each in run.family() if any("user_code.worker_supervisor" in word for word in each.cmdline())]
    return next((each for each in found if each.children()), None)


def episodes(run: CommandLine) -> list[dict[str, float]]:
    return [line for line in metrics(run).values() if "episode/failed_ratio" in line]


def test_512_agents_of_which_two_hang(command_line) -> None:
    """A step through Ray; in each of two processes the first agent never asks. Both are counted, the others train.
    Would not catch agents of which each is a process: memory bounds these.
    """
    keys = ("data.train_batch_size=128", "actor_rollout_ref.rollout.n=4", "trainer.total_training_steps=1")
    limits = (f"{TURNS}.tool_timeout_s=20", "trainer.val_before_train=false", "trainer.test_freq=5040")
    run = command_line(*keys, *limits, *ONE_RANK, RAY, *agent(FILE, "name=first_hangs"), config=GRPO)
    assert run.wait() == 0, run.text()
    [step] = episodes(run)
    assert step["episode/timed_out"] == 2 and step["episode/failed_ratio"] == pytest.approx(2 / 512)
    assert step["num_turns/max"] == 3 and run.left_over(10) == []


@pytest.mark.parametrize("launcher", [RAY, WITHOUT_RAY])
@pytest.mark.parametrize("killed", ["driver", "keeper", "worker"])
def test_a_kill_while_agents_are_at_work(command_line, launcher: str, killed: str) -> None:
    """Each agent is a process. Ten seconds after the driver nothing is left; without a keeper or a worker the run goes
    on, says so, and each step has all of its episodes. Would not catch a kill between two steps.
    """
    program = agent(f"command=[{sys.executable},tests/e2e/agent_program.py]")
    keys = (
        *SHORT,
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.test_freq=5040",
    )
    run = command_line(*keys, *ONE_RANK, launcher, *program, config=GRPO)

    def at_work() -> bool:
        return sum("agent_program.py" in title for title in run.titles()) >= 4 and keeper(run) is not None

    run.wait_for(at_work, interval=0.05)
    found = keeper(run)
    assert found is not None
    if killed == "driver":
        run.process.kill()
        run.process.wait(30)
        assert run.left_over(10) == []
        return
    (found if killed == "keeper" else found.children()[0]).kill()
    assert run.wait() == 0, run.text()
    assert len(episodes(run)) == 2 and run.left_over(10) == []
    assert ("keeps the workers of the agent was killed by SIGKILL; another one" in run.text()) == (killed == "keeper")
    assert all(step["episode/failed_ratio"] <= 0.25 for step in episodes(run)), json.dumps(episodes(run))
