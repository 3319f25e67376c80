"""Rules of turns: one thing answers them, its file has what is named, and nothing that would answer is left unread."""

from __future__ import annotations

import pytest

from megatron_rl.config.load import load_config
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
    ],
)
def test_what_answers_turns_is_named_once(overrides, sentence):
    """Would not catch a file whose function does something else."""
    assert sentence in said(*overrides)


def test_an_agent_rewards():
    """A run without a rule needs none. Would not catch an agent that gives nothing."""
    assert said(ON, AGENT, f"{TURNS}.agent.name=three_tries") == ""
