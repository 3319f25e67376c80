"""Rules of turns: one thing answers them, its file has what is named, and nothing that would answer is left unread."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from typed_commands import rows_of_agents

from megatron_rl.cli.tasks import startable
from megatron_rl.config.adapter_files import adapter_names, file_of
from megatron_rl.config.load import load_config
from megatron_rl.config.tasks import PPO
from megatron_rl.errors import ConfigError
from megatron_rl.planning.preflight import preflight

TURNS = "actor_rollout_ref.rollout.multi_turn"
AGENT, ENVIRONMENT = (f"{TURNS}.{name}.path=tests/e2e/agents_for_tests.py" for name in ("agent", "environment"))
ON = f"{TURNS}.enable=true"


def said(*overrides: str) -> str:
    keys = (*overrides, "custom_reward_function.path=null", "custom_reward_function.name=null")
    return "\n".join(map(str, preflight(load_config("configs/grpo_cpu.yaml", list(keys)))))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ((ON, AGENT, f"{TURNS}.agent.name=three_trials"), "did you mean: three_tries"),
        ((ON, AGENT, f"{TURNS}.agent.name=Retry"), "must be a function of tests/e2e/agents_for_tests.py"),
        ((ON, AGENT, ENVIRONMENT, f"{TURNS}.environment.name=Retry"), "cannot both be set"),
        ((ON, f"{TURNS}.agent.command=[no_such_program]"), "no_such_program is not found"),
        ((ON, f"{TURNS}.agent.command=[]"), "must name a program"),
        ((ON, f"{TURNS}.tool_config_path=tools.yaml"), "tool_config_path=tools.yaml must be"),
        ((AGENT,), "multi_turn.enable=false must be true, as"),
        ((ON,), "must be a Python file"),
        (
            (ON, f"{TURNS}.environment.path=adapter:gymnasium"),
            "try: actor_rollout_ref.rollout.multi_turn.python=envs/gymnasium/bin/python",
        ),
        (
            (ON, f"{TURNS}.environment.path=adapter:harbor", f"{TURNS}.python={sys.executable}"),
            "must be null with adapter:harbor",
        ),
    ],
)
def test_what_answers_turns_is_named_once(overrides, sentence):
    """Would not catch a file whose function does something else."""
    assert sentence in said(*overrides)


def test_an_agent_rewards():
    """A run without a rule needs none. Would not catch an agent that gives nothing."""
    assert said(ON, AGENT, f"{TURNS}.agent.name=three_tries") == ""


def test_a_replay_needs_no_interpreter():
    """A run does. Would not catch a replay that would start it; tests/agents has that it does not."""
    keys = (ON, AGENT, f"{TURNS}.agent.name=three_tries", f"{TURNS}.python=/nowhere/python")
    given = ["custom_reward_function.path=null", "custom_reward_function.name=null", *keys]
    run = startable(Path("configs/grpo_cpu.yaml"), given, PPO, False, is_replay=True)
    assert run.actor_rollout_ref.rollout.multi_turn.python == "/nowhere/python"
    with pytest.raises(ConfigError, match="/nowhere/python must be a Python interpreter"):
        startable(Path("configs/grpo_cpu.yaml"), given, PPO, False)


@pytest.mark.parametrize("row", rows_of_agents(), ids=lambda row: row[0])
def test_each_row_of_the_page_is_a_run_that_may_start(row: list[str]):
    """Its keys pass all checks, with this interpreter in place of one that the reader makes; what an adapter is given
    are arguments in its file. Would not catch an adapter that does not play; tests/agents/ecosystems has these.
    """
    _, how, keys = row
    given = [key if not key.startswith("python=") else f"python={sys.executable}" for key in keys.split("`")[1].split()]
    assert said(ON, *(f"{TURNS}.{key}" for key in given)) == ""
    path = next((key.partition("=")[2] for key in given if "path=adapter:" in key), None)
    if path is not None:
        tree = ast.parse(Path(file_of(path, "key")).read_text())
        arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        assert arguments >= set(how.split("`")[1::2]) != set()


def test_the_page_names_each_adapter():
    """Would not catch a wrong description."""
    assert {name for name in adapter_names() if any(f"adapter:{name}`" in keys for *_, keys in rows_of_agents())} == {
        *adapter_names()
    }
