"""Tools that are classes, in verl's YAML files: their life in an episode, what rows give them, rewards, refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megatron_rl.agents.class_tools import load_class_tools
from megatron_rl.agents.observation import Observation, TextLimit, ToolCall, Turn
from megatron_rl.agents.tools import ToolEnvironment, ToolSource
from megatron_rl.errors import ConfigError

TOOLS = """
import asyncio
from types import SimpleNamespace

LOG = []

class Guess:  # as verl's example of gsm8k: an instance has its truth, and keeps the best answer
    def __init__(self, config, tool_schema):
        self.penalty, self.name, self.truths = config["penalty"], tool_schema.function.name, {}
        assert tool_schema.model_dump()["function"]["parameters"]["required"] == ["answer"]
    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        await asyncio.sleep(0.01)
        assert kwargs["create_kwargs"] == {"ground_truth": ground_truth}
        self.truths[instance_id] = [ground_truth, 0]
        return instance_id, SimpleNamespace(text=None)
    async def execute(self, instance_id, parameters, **kwargs):
        truth, calls = self.truths[instance_id]
        self.truths[instance_id][1] += 1
        is_right = parameters["answer"] == truth
        return SimpleNamespace(text=f"{calls}: {is_right}"), 1.0 if is_right else self.penalty, {"tries": 1}
    async def calc_reward(self, instance_id, **kwargs):
        return 0.0
    async def release(self, instance_id, **kwargs):
        LOG.append((instance_id, self.truths.pop(instance_id)[0]))

class Plain:
    def __init__(self, config, tool_schema): pass
    def create(self, instance_id): return None
    def execute(self, instance_id, parameters): return "plain " + instance_id
    def release(self, instance_id): pass
    def get_openai_tool_schema(self):
        return {"type": "function", "function": {"name": "plain", "parameters": {}}}

class Half:
    def create(self): ...
"""
GUESS = """
  - class_name: MODULE.Guess
    config: {penalty: -0.5}
    tool_schema:
      type: function
      function:
        name: guess
        description: Say whether an answer is right.
        parameters: {type: object, properties: {answer: {type: string}, why: {type: string}}, required: [answer]}
"""
NAMES = """
  - class_name: MODULE.Plain
    tool_schema:
      function: {name: far, parameters: {properties: {from: {}, max-results: {}, self: {}}, required: [from]}}
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch) -> str:
    name = f"tools_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(TOOLS)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def written(folder: Path, module: str, text: str = GUESS) -> str:
    (folder / "tools.yaml").write_text("tools:" + text.replace("MODULE", module))
    return str(folder / "tools.yaml")


def play(environment: ToolEnvironment, truth: str, *turns: Turn) -> list[Observation]:
    given = {"tools_kwargs": {"guess": {"create_kwargs": {"ground_truth": truth}}}}

    async def episode() -> list[Observation]:
        await environment.reset({"extra_info": given})
        answers = [await environment.step(turn) for turn in turns]
        await environment.close()
        return answers

    return asyncio.run(episode())


def call(name: str, /, **arguments: str) -> Turn:
    return Turn("", (ToolCall(name, arguments),))


def test_calls_of_one_turn_share_an_instance(tmp_path, module):
    """Two at once, before there is an instance: it is created once. Would not catch a `create` that is not async."""
    tools = load_class_tools(written(tmp_path, module), "key")
    twice = Turn("", tuple(ToolCall("guess", {"answer": answer}) for answer in "67"))
    (answer,) = play(ToolEnvironment(tools, 2, 5.0), "7", twice)
    assert [message["content"] for message in answer.messages] == ["0: False", "1: True"]


@pytest.mark.parametrize("gives_rewards", [False, True])
def test_an_instance_lives_for_an_episode(tmp_path, module, gives_rewards):
    """By hand: made with what its row gives, asked twice, released; rewards are logged, and count where asked for.

    Would not catch a class that keeps its state elsewhere.
    """
    tools = load_class_tools(written(tmp_path, module), "key")
    environment = ToolEnvironment(tools, 2, 5.0, gives_rewards)
    first, second, end = play(environment, "7", call("guess", answer="6"), call("guess", answer="7"), Turn("7"))
    assert [answer.messages[0]["content"] for answer in (first, second)] == ["0: False", "1: True"]
    assert first.counts == {"tool_calls": 1.0, "tool_reward": -0.5, "tries": 1.0} and end.is_done
    assert [first.reward, second.reward] == ([-0.5, 1.0] if gives_rewards else [0.0, 0.0])
    other = ToolEnvironment(tools, 2, 5.0)
    assert play(other, "8", call("guess", answer="8"))[0].messages[0]["content"] == "0: True"
    log = __import__(module).LOG
    assert [truth for _, truth in log] == ["7", "8"] and log[0][0] != log[1][0]
    assert not environment.keeps_nothing


def test_arguments_are_those_of_the_schema(tmp_path, module):
    """A required one is missing, one is unknown; a class with its own schema, without async. Would not catch types."""
    text = GUESS + "  - class_name: MODULE.Plain\n"
    environment = ToolEnvironment(load_class_tools(written(tmp_path, module, text), "key"), 1, 5.0)
    turns = call("guess", why="x"), call("guess", answer="1", who="x"), call("plain")
    *wrong, right = play(environment, "7", *turns)
    assert all(answer.counts["tool_arguments"] == 1 for answer in wrong)
    assert right.messages[0]["content"].startswith("plain plain-")
    source = ToolSource(written(tmp_path, module, text), "key", True, 1, 5.0, False, TextLimit(99))
    assert [schema["function"]["name"] for schema in source.schemas()] == ["guess", "plain"]
    assert source.host().opens is False


def test_names_of_arguments_need_not_be_pythons(tmp_path, module):
    """A keyword, a hyphen, `self`: given, and `from` missing. Would not catch a class that cannot take them."""
    environment = ToolEnvironment(load_class_tools(written(tmp_path, module, NAMES), "key"), 1, 5.0)
    given = dict.fromkeys(("from", "max-results", "self"), "x")
    right, wrong = play(environment, "7", call("far", **given), call("far"))
    assert right.messages[0]["content"].startswith("plain far-")
    assert "missing a required argument: 'from'" in wrong.messages[0]["content"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (GUESS + GUESS, r"tools\[1\] has the name of another tool, guess"),
        (" 7", "must have a list `tools`"),
        ("\n  - {class_name: MODULE.Guess}", "cannot be made: KeyError"),
        ("\n  - {class_name: MODULE.Guesses}", "cannot be imported: AttributeError"),
        ("\n  - {class_name: no_such_module.Guess}", "cannot be imported: ModuleNotFoundError"),
        ("\n  - {class_name: Guess}", "must be MODULE.CLASS"),
        ("\n  - {class_name: MODULE.Half}", r"it has no \['execute', 'release'\]"),
        ("\n  - {class_name: MODULE.Plain, tool_schema: {function: {}}}", "must have function.name"),
        ("\n  - [", "must be a YAML file"),
    ],
)
def test_files_without_usable_tools_are_refused(tmp_path, module, text, sentence):
    """Would not catch a schema that says something else than the class does."""
    with pytest.raises(ConfigError, match=sentence):
        load_class_tools(written(tmp_path, module, text), "key")
