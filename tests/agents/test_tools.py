"""Tools: their schemas, calls in the formats of real models, and what goes wrong with a call."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase

from megatron_rl.agents.as_json import turn_from_json
from megatron_rl.agents.environment_host import TurnJob
from megatron_rl.agents.environment_source import EnvironmentProcesses
from megatron_rl.agents.observation import Observation, TextLimit, ToolCall, Turn
from megatron_rl.agents.thoughts import PLAIN, ThoughtMarks
from megatron_rl.agents.tool_parser import ToolParser
from megatron_rl.agents.tools import ToolEnvironment, ToolSource, load_tools, schemas_of
from megatron_rl.errors import ConfigError

TOOLS = """
import asyncio, functools, time
from megatron_rl.agents.tools import tool

@tool
def add(a: int, b: int = 1) -> dict:
    '''Add two numbers.

    Args:
        a: the first
        b: the second
    '''
    return {"sum": a + b}

@tool
async def wait(seconds: float) -> str:
    '''Wait.

    Args:
        seconds: how long
    '''
    await asyncio.sleep(seconds)
    return "waited"

@tool
def block(seconds: float) -> str:
    '''Wait, and let nobody else.

    Args:
        seconds: how long
    '''
    time.sleep(seconds)
    return "x" * 10**7

@tool
def strange(way: str):
    '''Do what JSON or the process cannot have.

    Args:
        way: what
    '''
    if way == "exit":
        raise SystemExit(3)
    if way == "keys":
        return {(1, 2): 3}
    if way == "generator":
        return (number for number in (1, 2))
    cycle = []
    cycle.append(cycle)
    deep = []
    for _ in range(10**5):
        deep = [deep]
    return cycle if way == "cycle" else deep

@tool
async def leave() -> str:
    '''Leave the process.'''
    raise SystemExit(4)

@tool
async def cancel() -> str:
    '''Wait for a task that is cancelled.'''
    raise asyncio.CancelledError

@tool
async def stay() -> str:
    '''End on no account.'''
    until = time.monotonic() + 4
    while time.monotonic() < until:
        try:
            await asyncio.sleep(0.2)
        except BaseException:
            pass

def wrapped(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner

@tool
@wrapped
async def behind() -> str:
    '''Be behind a decorator.'''
    return "seen"

def helper(x): ...
"""


NAMES = ("add", "wait", "block", "strange", "leave", "cancel", "stay", "behind")


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "tools.py").write_text(TOOLS)
    return str(tmp_path / "tools.py")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained("assets/demo/model")


def step(environment: ToolEnvironment, *calls: ToolCall, problem: str = "") -> Observation:
    async def episode() -> Observation:
        await environment.reset({})
        return await environment.step(Turn("", calls, problem))

    return asyncio.run(episode())


def test_schemas_come_from_types_and_docstrings(file: str):
    """Of marked functions alone. Would not catch a template that leaves them out."""
    schemas = schemas_of(load_tools(file, "key"), "key")
    assert [schema["function"]["name"] for schema in schemas] == [*NAMES]
    parameters = schemas[0]["function"]["parameters"]
    assert parameters["properties"]["a"] == {"type": "integer", "description": "the first"}
    assert parameters["required"] == ["a"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = 1", "must mark a function with @tool"),
        ("1 / 0", "fails to run: ZeroDivisionError"),
        ("from megatron_rl.agents.tools import tool\n@tool\ndef f(x): ...", "the tool f needs a type and a line"),
    ],
)
def test_files_without_usable_tools_are_refused(tmp_path: Path, text: str, sentence: str):
    """Would not catch a docstring that says something else than the function does."""
    (tmp_path / "tools.py").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        schemas_of(load_tools(str(tmp_path / "tools.py"), "key"), "key")


def test_what_goes_wrong_with_a_call_is_a_text_and_a_count(file: str):
    """Unknown, other arguments, an error, too late, too many, unreadable; right ones beside them, two at once.

    Would not catch a function that takes the process with it: that is the keeper's.
    """
    environment = ToolEnvironment(load_tools(file, "key"), max_calls=5, timeout_s=0.5)
    calls = [("add", {"a": 2, "b": 3}), ("sub", {}), ("add", {"c": 1}), ("add", {"a": "x"}), ("wait", {"seconds": 60})]
    answer = step(environment, *(ToolCall(*call) for call in [*calls, ("add", {"a": 1})]))
    texts = [message["content"] for message in answer.messages]
    assert texts[0] == '{"sum": 5}' and {message["role"] for message in answer.messages} == {"tool"}
    for text, part in zip(
        texts[1:],
        (
            "no tool sub; there are " + ", ".join(NAMES),
            "missing a required",
            "TypeError",
            "within 0.5 s",
            "at most 5 calls",
        ),
        strict=True,
    ):
        assert text.startswith("Error: ") and part in text
    causes = ("unknown", "arguments", "raised", "timed_out", "refused")
    assert answer.counts == {"tool_calls": 6.0} | {f"tool_{cause}": 1.0 for cause in causes}
    assert not answer.is_done and step(environment).is_done
    problem = step(environment, problem="Error: this call cannot be read")
    assert problem.counts == {"tool_unreadable": 1.0} and problem.messages[0]["content"].endswith("cannot be read")


def test_results_that_json_cannot_have_and_exits_are_texts(file: str):
    """A right call beside them is answered. Would not catch a tool that ends its process in C."""
    environment = ToolEnvironment(load_tools(file, "key"), max_calls=9, timeout_s=30.0)
    ways, names = ("exit", "keys", "cycle", "deep", "generator"), ("leave", "cancel", "behind")
    calls = [*(ToolCall("strange", {"way": way}) for way in ways), *(ToolCall(name, {}) for name in names)]
    calls.append(ToolCall("add", {"a": 1}))
    answer = step(environment, *calls)
    texts = [message["content"] for message in answer.messages]
    assert texts[0] == "Error: SystemExit: 3"
    assert texts[5:] == ["Error: SystemExit: 4", "Error: CancelledError: ", "seen", '{"sum": 2}']
    assert all(text.startswith("Error: strange returned what JSON cannot have: ") for text in texts[1:5])
    assert answer.counts == {"tool_calls": 9.0, "tool_raised": 7.0}


def test_a_call_that_does_not_let_itself_be_cancelled_is_given_up(file: str):
    """Would not catch one that never waits: the keeper ends its process."""
    environment = ToolEnvironment(load_tools(file, "key"), max_calls=1, timeout_s=0.2)
    start = time.monotonic()

    async def answered() -> Observation:
        await environment.reset({})
        answer = await environment.step(Turn("", (ToolCall("stay", {}),)))
        assert time.monotonic() - start < 3
        return answer

    assert asyncio.run(answered()).messages[0]["content"] == "Error: stay did not return within 0.2 s"


def test_calls_that_hang_take_no_thread_of_others_and_wear_a_process_out(file: str, tmp_path: Path, monkeypatch):
    """Forty calls that hang: the next one is answered at once here; a worker is replaced, and its environments go on.
    Would not catch threads that hold the interpreter's lock.
    """
    text = (tmp_path / "tools.py").read_text() + "\nfrom megatron_rl.user_code import user_calls\n"
    (tmp_path / "tools.py").write_text(
        text + "user_calls.LOST_AFTER_S = 0.0\n@tool\ndef pid() -> int:\n    "
        "'''The process.'''\n    import os\n    return os.getpid()\n"
    )
    hang, ask = (ToolCall("block", {"seconds": 1000.0}),) * 40, (ToolCall("pid", {}),)
    source = ToolSource(file, "key", False, 99, 1.0, False, TextLimit(1000))
    with EnvironmentProcesses(source, 1, 60.0) as processes:
        said = []
        for number, calls in enumerate((ask, hang, ask)):
            processes.play(number, TurnJob(number, {}, (), Turn("", calls)))
            [(_, answer)] = processes.take(waits=True)
            assert isinstance(answer, Observation)
            said.append(answer.messages[0]["content"])
    assert said[1] == "Error: block did not return within 1 s" and len({*said}) == 3


def test_tools_may_block_and_say_a_lot(file: str):
    """They run in threads. Would not catch tools that hold the interpreter's lock."""
    environment = ToolEnvironment(load_tools(file, "key"), max_calls=2, timeout_s=5.0)
    answer = step(environment, *(ToolCall("block", {"seconds": 0.3}) for _ in range(2)))
    assert all(len(message["content"]) < 200_000 for message in answer.messages) and len(answer.messages) == 2


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", 'sure <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', [ToolCall("add", {"a": 1})]),
        (
            "pythonic",
            "[add(a=1, b=2), wait(seconds=0.5)]",
            [ToolCall("add", {"a": 1, "b": 2}), ToolCall("wait", {"seconds": 0.5})],
        ),
        ("hermes", "an answer", []),
    ],
)
def test_calls_are_read_as_the_model_writes_them(file, tokenizer, name, text, calls):
    """By vLLM's parsers, from tokens, with the end token. Would not catch a format that needs tokens of its own."""
    schemas = schemas_of(load_tools(file, "key"), "key")
    parser = ToolParser(name, "key", tokenizer, schemas, [tokenizer.eos_token_id])
    turn = parser.turn([*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id])
    assert list(turn.calls) == calls and turn.problem == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1}', "cannot be read"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be an object"),
    ],
)
def test_unreadable_calls_are_told_to_the_policy(file, tokenizer, text, problem):
    """Would not catch text that is close to a call in formats without a mark, which is an answer then."""
    parser = ToolParser("hermes", "key", tokenizer, schemas_of(load_tools(file, "key"), "key"), [])
    turn = parser.turn(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert problem in turn.problem and turn.calls == ()


KNOWN, OPENED = ThoughtMarks("<think>", "</think>"), ThoughtMarks("<think>", "</think>", is_open=True)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 9}}</tool_call>'
INSIDE = f"<think>\nI could write {CALL}\n</think>\n\n"


@pytest.mark.parametrize(
    ("thoughts", "text", "expected"),
    [
        (KNOWN, INSIDE + "No call.", Turn("No call.", reasoning_content=f"I could write {CALL}")),
        (KNOWN, INSIDE + CALL, Turn("", (ToolCall("add", {"a": 9}),), reasoning_content=f"I could write {CALL}")),
        (KNOWN, f"<think>{CALL}", Turn("", reasoning_content=CALL)),
        (OPENED, f"{CALL}</think>So.", Turn("So.", reasoning_content=CALL)),
        (OPENED, CALL, Turn("", reasoning_content=CALL)),
        (PLAIN, INSIDE + "No call.", Turn(INSIDE + "No call.")),
        (PLAIN, INSIDE + CALL, Turn(INSIDE, (ToolCall("add", {"a": 9}),))),
    ],
)
def test_a_call_inside_of_a_thought_is_no_call(file, thoughts, text, expected):
    """The thought is the turn's own field where the template knows thoughts, and stays in the text where it does not.
    Would not catch a second thought behind the answer.
    """
    tokenizer = ByT5Tokenizer()
    parser = ToolParser("hermes", "key", tokenizer, schemas_of(load_tools(file, "key"), "key"), [], thoughts)
    turn = parser.turn(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert turn == expected and turn == turn_from_json(asdict(turn))


def test_a_format_that_nobody_knows_names_the_nearest(file, tokenizer):
    """And one that this tokenizer does not go with. Would not catch a format of another vLLM."""
    schemas = schemas_of(load_tools(file, "key"), "key")
    with pytest.raises(ConfigError, match="did you mean: hermes"):
        ToolParser("hermies", "multi_turn.format", tokenizer, schemas, [])
    with pytest.raises(ConfigError, match="does not go with this tokenizer"):
        ToolParser("llama3_json", "multi_turn.format", tokenizer, schemas, [])
    with pytest.raises(ConfigError, match="needs one that writes channels"):
        ToolParser("openai", "multi_turn.format", tokenizer, schemas, [])
