"""Environments and agents that another interpreter runs: replies, failures, lost programs, what cannot be loaded.

The interpreter is the tests' own: tests/agents/ecosystems has those with packages that the run does not have.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from megatron_rl.agents.environment_host import TurnJob
from megatron_rl.agents.environment_source import EnvironmentProcesses, EnvironmentsHere
from megatron_rl.agents.observation import EpisodeFailure, InitialConversation, Observation, TextLimit, Turn
from megatron_rl.agents.other_interpreter import InterpreterSource
from megatron_rl.config.adapter_files import adapter_names, file_of
from megatron_rl.errors import ConfigError

pytestmark = pytest.mark.timeout(120)

PLAYS = """
import os, sys, time
print("no reply")
class Environment:
    def __init__(self, start=0): self.total = start
    def reset(self, row): self.total += row["index"]; self.prompt = row["prompt"]
    def opening(self): return self.prompt + "!"
    def step(self, turn):
        self.total += 1
        return eval(turn.text)
class Waits:
    async def reset(self, row): self.index = row["index"]
    async def step(self, turn):
        import asyncio
        await asyncio.sleep(0.5)
        return turn.calls[0].name if turn.calls else turn.text, 1.0, True
async def run(task, endpoint, weight=1.0):
    import openai
    client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    reply = await client.chat.completions.create(model="x", messages=task["prompt"])
    if reply.choices[0].message.content == "raise": raise ValueError(7)
    return weight * len(reply.choices[0].message.content)
"""
NEXT, KILL = "(str(self.total), 0.25, False)", "os.kill(os.getpid(), 9)"
OPENING = InitialConversation(({"role": "user", "content": "x!"},))


def source(folder: Path, name: str = "Environment", text: str = PLAYS, timeout_s: float = 5.0, **more: object):
    (folder / "plays.py").write_text(text)
    given = {"python": sys.executable, "kwargs": {}, "is_agent": False} | more
    path, limit = str(folder / "plays.py"), TextLimit(100)
    keys = {"python_key": "multi_turn.python", "key": "environment.path", "name": name}
    return InterpreterSource(path=path, limit=limit, timeout_s=timeout_s, **given, **keys)


def job(episode: int, text: str, *before: tuple[Turn, Observation], opening=OPENING) -> TurnJob:
    return TurnJob(episode, {"index": episode, "prompt": "x"}, before, Turn(text), opening)


def play(environments: EnvironmentProcesses | EnvironmentsHere, *jobs: TurnJob) -> list:
    for number, each in enumerate(jobs):
        environments.play(number, each)
    replies: dict = {}
    while len(replies) < len(jobs):
        replies.update(environments.take(waits=True))
    return [replies[number] for number in range(len(jobs))]


def said(*replies: Observation) -> list[str]:
    return [reply.messages[0]["content"] for reply in replies]


def both(of: InterpreterSource):
    yield EnvironmentsHere(of.host())
    yield EnvironmentProcesses(of, 1, of.timeout_s, True)


def test_a_killed_program_costs_the_episode_that_killed_it(tmp_path, request):
    """Here and in a worker: the others' earlier turns are played again, by another program. Would not catch a killed
    program whose environments keep nothing.
    """
    gc.disable()
    request.addfinalizer(gc.enable)
    for environments in both(source(tmp_path, kwargs={"start": 10})):
        with environments:
            first = play(environments, *(job(number, NEXT) for number in range(3)))
            assert said(*first) == ["11", "12", "13"]
            before = [(Turn(NEXT), reply) for reply in first]
            (killed,) = play(environments, job(0, KILL, before[0]))
            assert isinstance(killed, EpisodeFailure) and killed.cause == "crashed"
            again = play(environments, *(job(number, NEXT, before[number]) for number in (1, 2)))
            gc.collect()  # what is left of the killed program's connection shares its descriptor's number with the new
            again += play(environments, job(1, NEXT, before[1], (Turn(NEXT), again[0])))
            assert said(*again) == ["13", "14", "14"]


@pytest.mark.parametrize(
    ("text", "cause", "reason"),
    [
        ("1 / 0", "raised", "it raised ZeroDivisionError: division by zero"),
        ("exec('sys.exit(7)')", "raised", "SystemExit: 7"),
        ("object(), 0.0, True", "raised", "object is not JSON serializable"),
        ("('a', float('nan'), False)", "raised", "Out of range float values"),
        ("('a', True, 1)", "no_answer", "done must be True or False"),
        ("7", "no_answer", "it returned 7"),
        ("{'text': 'a'}", "no_answer", "the fields of an Observation"),
        ("time.sleep(1000)", "timed_out", "tool_timeout_s=2"),
    ],
)
def test_a_wrong_reply_costs_one_episode(tmp_path, text, cause, reason):
    """With the reason. Would not catch one that costs the program, which is started again."""
    with EnvironmentsHere(source(tmp_path, timeout_s=2.0).host()) as environments:
        (failed,) = play(environments, job(0, text))
        assert isinstance(failed, EpisodeFailure) and failed.cause == cause and reason in failed.reason
        (last,) = play(environments, job(1, "{'messages': 'a', 'reward': 1.0, 'is_done': True, 'counts': {'n': 2.0}}"))
        assert (last.reward, last.is_done, last.counts) == (1.0, True, {"n": 2.0})


def test_coroutines_wait_at_the_same_time(tmp_path):
    """Forty times 0.5 s. Would not catch those of two programs."""
    with EnvironmentProcesses(source(tmp_path, "Waits"), 1, 15.0) as environments:
        replies = play(environments, *(job(number, "go", opening=None) for number in range(40)))
    assert not [reply for reply in replies if isinstance(reply, EpisodeFailure)]
    assert said(*replies) == ["go"] * 40


def test_an_agent_is_run_with_its_keyword_arguments(tmp_path):
    """By its opening, reward and failure. Would not catch another interpreter's client."""
    of = source(tmp_path, "run", timeout_s=60.0, is_agent=True, kwargs={"weight": 2.0})
    with EnvironmentsHere(of.host()) as environments:
        row = {"index": 0, "prompt": [{"role": "user", "content": "x"}]}
        for episode, text, reward in ((0, "four", 8.0), (1, "raise", None)):
            environments.play(0, TurnJob(episode, row, (), None))
            ((_, opening),) = environments.take(waits=True)
            assert opening.messages == ({"role": "user", "content": "x"},)
            environments.play(0, TurnJob(episode, row, (), Turn(text), opening))
            ((_, last),) = environments.take(waits=True)
            if reward is None:
                assert last.cause == "raised" and "ValueError: 7" in last.reason
            else:
                assert last.is_done and last.reward == reward


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"text": "import no_such_module"}, "No module named 'no_such_module'"),
        ({"text": "import no_such_module"}, "-m pip install no-such-module"),
        ({"name": "Enviroment"}, "must define Enviroment"),
        ({"text": "class Environment:\n    def reset(self, row): pass\n"}, "it has no step"),
        (
            {"kwargs": {"strat": 1}},
            "kwargs must be arguments of Environment: got an unexpected keyword argument 'strat'",
        ),
        (
            {"name": "run", "is_agent": True, "kwargs": {"wait": 1}},
            "it takes (task, endpoint, weight=1.0)",
        ),
        ({"python": "/nowhere/python"}, "multi_turn.python=/nowhere/python"),
        ({"python": "/bin/false"}, "has ended"),
        ({"text": "import os\nos._exit(3)"}, "has ended"),
    ],
)
def test_what_cannot_be_loaded_is_refused_before_the_run(tmp_path, more, reason):
    """Would not catch what fails only when an object is made."""
    with pytest.raises(ConfigError) as refusal:
        source(tmp_path, **more).host()
    assert reason in str(refusal.value)


def test_adapters_have_names():
    """Each is a file, and a wrong name suggests one. Would not catch an adapter that does not work."""
    for name in adapter_names():
        assert Path(file_of(f"adapter:{name}", "key")).is_file()
    assert file_of("my.py", "key") == "my.py"
    with pytest.raises(ConfigError, match="did you mean: adapter:gymnasium"):
        file_of("adapter:gymnasum", "key")
