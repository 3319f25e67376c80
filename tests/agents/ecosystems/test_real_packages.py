"""Adapters with the packages that they are for, each in an environment of its own that pip fills."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from served import served

from megatron_rl.agents.environment_host import TurnJob
from megatron_rl.agents.environment_source import EnvironmentsHere
from megatron_rl.agents.observation import InitialConversation, Observation, TextLimit, ToolCall, Turn
from megatron_rl.agents.other_interpreter import InterpreterProgram, InterpreterSource
from megatron_rl.config.adapter_files import file_of

pytestmark = [pytest.mark.weekly, pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
ADDED = Turn("", (ToolCall("adder_add", {"terms": "3+3"}),))
GUESSES = ("3", "7", "5")


def source(python: str, adapter: str, kwargs: dict, is_agent: bool = False) -> InterpreterSource:
    name = "run" if is_agent else "Environment"
    keys = {"python_key": "multi_turn.python", "key": "path", "name": name, "timeout_s": 120.0}
    path, limit = adapter if adapter.endswith(".py") else f"adapter:{adapter}", TextLimit(1000)
    return InterpreterSource(python=python, path=path, kwargs=kwargs, limit=limit, is_agent=is_agent, **keys)


def tasks(python: str, adapter: str, name: str, **kwargs: object) -> list[dict]:
    hello = {"file": file_of(f"adapter:{adapter}", "key"), "name": "rows", "methods": [], "kwargs": kwargs}
    program = InterpreterProgram(python, "multi_turn.python", hello, adapter)

    async def made() -> list[dict]:
        try:
            return await program.call(0, "rows", name, 8, 0)
        finally:
            await program.close()

    return asyncio.run(made())


def reward(of: InterpreterSource, row: dict, turns: Sequence[str | Turn]) -> float:
    """Play turns until the episode is done; returns the sum of its rewards."""
    total, before, opening = 0.0, (), None
    with EnvironmentsHere(of.host()) as environments:
        if environments.opens:
            environments.play(0, TurnJob(0, row, (), None))
            ((_, opening),) = environments.take(waits=True)
            assert isinstance(opening, InitialConversation), opening
        for turn in (Turn(turn) if isinstance(turn, str) else turn for turn in turns):
            environments.play(0, TurnJob(0, row, before, turn, opening))
            ((_, reply),) = environments.take(waits=True)
            assert isinstance(reply, Observation), reply
            before, total = (*before, (turn, reply)), total + reply.reward
    assert reply.is_done
    return total


@pytest.mark.parametrize(
    ("package", "adapter", "kwargs", "turns", "expected"),
    [
        ("gymnasium", "gymnasium", {"id": "Blackjack-v1", "actions": ["stick", "hit"]}, ("x", "hit", "stick"), -1.0),
        ("textarena", "textarena", {"id": "GuessTheNumber-v0-raw"}, ("[5]", "x", "[100]"), 16 / 19),
        ("textarena", "textarena", {"id": "TicTacToe-v0-raw", "players": 2}, ("[4]", "[0]", "[2]", "[6]"), 1.0),
        ("tinker-cookbook", "tinker_cookbook", {"file": str(HERE / "tinker_guess.py")}, GUESSES, 1.0),
    ],
)
def test_an_episode_has_the_packages_rewards(interpreter, package, adapter, kwargs, turns, expected):
    """By hand. Would not catch another version's rewards, which would be another number."""
    row = {"index": 3, "sample": 1, "ground_truth": "5", "prompt": "x", "extra_info": {}}
    assert reward(source(interpreter(package), adapter, kwargs), row, turns) == pytest.approx(expected)


def test_reasoning_gyms_tasks_have_their_own_rewards(interpreter):
    """Ten datasets: a task's own answer has a reward of 1. Would not catch partial rewards."""
    python = interpreter("reasoning-gym")
    for name in ("chain_sum", "gcd", "prime_factorization", "word_sorting", "leg_counting", "base_conversion"):
        row, *_ = tasks(python, "reasoning_gym", name)
        of = source(python, "reasoning_gym", {})
        assert reward(of, {"index": 0, **row}, (row["ground_truth"],)) == 1.0
        assert reward(of, {"index": 0, **row}, ("nothing",)) < 1.0


@pytest.mark.parametrize(
    ("taskset", "turns", "expected"),
    [("guesses-v1", ("2", "5", "3"), 1.0), ("guesses-v1", ("x",), 0.0), ("added-v1", (ADDED, "6"), 1.0)],
)
def test_verifiers_plays_several_turns_and_tools(interpreter, monkeypatch, taskset, turns, expected):
    """With its own harness and rubric. Would not catch a taskset that asks a judge."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    python = interpreter("verifiers==0.4.0")
    task = tasks(python, "verifiers", taskset)[3]
    of = source(python, "verifiers", {"env": {"taskset": {"id": taskset}}}, is_agent=True)
    assert reward(of, {"index": 3, **task}, turns) == expected


@pytest.mark.parametrize("client", ["chat", "messages", "responses", "openai_agents"])
def test_real_clients_stream_call_and_limit_their_turns(interpreter, client):
    """A streamed call, a streamed text behind its result, and a turn with a limit, over one conversation. OpenAI's
    agents raise where a turn is cut, so theirs is not. Would not catch tokens; test_ecosystem_runs.py does.
    """
    python = interpreter("openai anthropic openai-agents")
    of = source(python, str(HERE / "real_clients.py"), {"client": client}, is_agent=True)
    turns = [Turn("", (ToolCall("add", {"terms": "3+3"}),), num_tokens=5), Turn("6", num_tokens=2)]
    turns += [Turn("x", num_tokens=1, is_cut=True, drawn=(("x", -0.5),))] if client != "openai_agents" else []
    assert reward(of, {"index": 0, "prompt": "3+3", "ground_truth": "6", "extra_info": {}}, turns) == 1.0


def test_a_server_of_openenv_is_played_and_its_end_fails_the_episode(interpreter):
    """Rewards, and a server that has gone. Would not catch one that replies late."""
    python = interpreter("openenv-core")
    row = {"index": 5, "prompt": "0-15?", "extra_info": {}}
    with served(python) as (url, _):
        assert reward(source(python, "openenv", {"url": url, "observation": "text"}), row, GUESSES) == 1.0
    with EnvironmentsHere(source(python, "openenv", {"url": url, "observation": "text"}).host()) as environments:
        environments.play(0, TurnJob(0, row, (), None))
        ((_, failed),) = environments.take(waits=True)
        assert failed.cause == "raised" and "cannot be reached" in failed.reason
