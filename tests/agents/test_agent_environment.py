"""Agents that speak OpenAI's protocol, with its own client: in functions and in processes, and what can go wrong."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from megatron_rl.agents.agent_environment import AgentSource
from megatron_rl.agents.anthropic_messages import AnthropicMessages
from megatron_rl.agents.as_json import Answer, Played
from megatron_rl.agents.endpoint import Endpoint, largest_body
from megatron_rl.agents.environment_host import TurnJob
from megatron_rl.agents.environment_source import EnvironmentProcesses, EnvironmentsHere
from megatron_rl.agents.observation import EpisodeFailure, InitialConversation, Observation, ToolCall, Turn
from megatron_rl.agents.openai_chat import OpenAIChat

pytestmark = pytest.mark.timeout(120)

AGENTS = """
import asyncio
import httpx, openai

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

def asks(endpoint, kind=openai.AsyncOpenAI, retries=1):
    return kind(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=retries).chat.completions.create

async def guess(task, endpoint):
    create, messages = asks(endpoint), [{"role": "system", "content": "guess"}, {"role": "user", "content": "?"}]
    for number in range(task["turns"]):
        answer = await create(model="any", messages=messages, temperature=0.3)
        messages += [answer.choices[0].message, {"role": "user", "content": f"no {number}"}]
    return 0.5

def blocking(task, endpoint):
    create = asks(endpoint, openai.OpenAI)
    answer = create(model="any", messages=[{"role": "user", "content": [{"type": "text", "text": "now"}]}])
    return float(answer.choices[0].message.content)

async def streams(task, endpoint):
    create, messages = asks(endpoint), [{"role": "user", "content": "1+2, 3+4"}]
    options = {"include_usage": True}
    stream = await create(model="any", messages=messages, tools=[ADD], stream=True, stream_options=options)
    calls, ends = {}, []
    async for chunk in stream:
        if chunk.usage:
            ends.append(chunk.usage.total_tokens)
            break
        (choice,) = chunk.choices
        ends.append(choice.finish_reason)
        for call in choice.delta.tool_calls or []:
            calls[call.index] = {"id": call.id, "type": "function", "function": call.function.model_dump()}
    assert ends[-2:] == ["tool_calls", 0] and len(calls) == 2, (ends, calls)
    messages.append({"role": "assistant", "content": None, "tool_calls": [calls[0], calls[1]]})
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in calls.values()]
    answer = await create(model="any", messages=messages, tools=[ADD])
    assert answer.choices[0].finish_reason == "stop"

async def branches(task, endpoint):
    create, one = asks(endpoint), [{"role": "user", "content": "one"}]
    answer = await create(model="any", messages=one)
    await asyncio.gather(*(create(model="any", messages=[{"role": "user", "content": text}]) for text in "ab"))
    more = [*one, answer.choices[0].message, {"role": "user", "content": "more"}]
    await create(model="any", messages=more, tools=[ADD])

async def is_refused(task, endpoint):
    create = asks(endpoint)
    for wrong in ({"n": 2}, {"stop": ["x"]}, {"response_format": {"type": "json_object"}}):
        try:
            await create(model="any", messages=[{"role": "user", "content": "one"}], **wrong)
            raise AssertionError(wrong)
        except openai.BadRequestError:
            pass
    try:
        await openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="other").models.list()
        raise AssertionError("another key")
    except openai.AuthenticationError:
        pass
    await create(model="any", messages=[{"role": "user", "content": "one"}])
    async with httpx.AsyncClient() as client:
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        assert (await client.post(f"{endpoint.base_url}/reward", json={"reward": "x"}, headers=headers)).is_error
        assert (await client.post(f"{endpoint.base_url}/reward", json={"reward": 2}, headers=headers)).is_success
    return 0.25

async def retries(task, endpoint):
    create = asks(endpoint, retries=50)
    answer = await create(model="any", messages=[{"role": "user", "content": "one"}], timeout=0.5)
    assert answer.choices[0].message.content == "late"

async def raises(task, endpoint):
    raise ValueError("no more")

async def cancels(task, endpoint):
    waiting = asyncio.ensure_future(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(waiting.cancel)
    await waiting

async def stays(task, endpoint):
    for _ in range(20):
        try:
            await asyncio.sleep(0.2)
        except BaseException:
            pass

def behind(task, endpoint):
    return raises(task, endpoint)

async def asks_nothing(task, endpoint):
    return 1.0

async def sleeps(task, endpoint):
    await asyncio.sleep(60)

async def another_reward(task, endpoint):
    await asks(endpoint)(model="any", messages=[{"role": "user", "content": "one"}])
    return "good"
"""
PROGRAM = """
import json, os, subprocess, sys
import openai
task = json.load(sys.stdin)
if task["way"] == "fails":
    print("about to fail")
    sys.exit(3)
if task["way"] == "hangs":
    subprocess.run(["sleep", "1000"])
client = openai.OpenAI()
answer = client.chat.completions.create(model="any", messages=[{"role": "user", "content": task["way"]}])
client.post("/reward", body={"reward": float(answer.choices[0].message.content)}, cast_to=object)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def source(folder: Path, name: str, timeout_s: float = 20.0) -> AgentSource:
    return AgentSource(str(folder / "agents.py"), name, "agent.path", (), timeout_s)


def program(folder: Path, timeout_s: float = 60.0) -> AgentSource:
    return AgentSource(None, "run", "agent.path", (sys.executable, str(folder / "program.py")), timeout_s)


class Player:
    """Plays one episode: `say` is a turn of the policy."""

    def __init__(self, environments: EnvironmentsHere | EnvironmentProcesses, episode: int = 0, **row: object) -> None:
        self.environments, self.episode, self.row = environments, episode, row
        self.before: list[Played] = []
        self.opening = self._play(None)

    def say(self, text: str, *calls: ToolCall) -> Answer:
        turn = Turn(text, calls)
        answer = self._play(turn)
        if isinstance(answer, Observation):
            self.before.append((turn, answer))
        return answer

    def _play(self, turn: Turn | None) -> Answer:
        opening = self.opening if turn is not None and isinstance(self.opening, InitialConversation) else None
        self.environments.play(7, TurnJob(self.episode, self.row, tuple(self.before), turn, opening))
        [(number, answer)] = self.environments.take(waits=True)
        assert number == 7
        return answer


def text(content: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": content},)


def test_a_conversation_is_an_episode(folder):
    """OpenAI's client, async and blocking, here and in processes: its requests are what the policy reads, its end is
    the episode's. Would not catch another client.
    """
    with ExitStack() as opened:
        processes = opened.enter_context(EnvironmentProcesses(source(folder, "guess"), 1, 60.0, opens=True))
        for environments in (processes, opened.enter_context(EnvironmentsHere(source(folder, "guess").host()))):
            player = Player(environments, turns=2)
            assert player.opening == InitialConversation(({"role": "system", "content": "guess"}, *text("?")))
            assert player.say("3") == Observation(text("no 0"))
            assert player.say("4") == Observation((), 0.5, is_done=True)
        here = opened.enter_context(EnvironmentsHere(source(folder, "blocking").host()))
        players = [Player(here, episode) for episode in range(40)]  # more than any pool of threads has
        assert all(player.opening == InitialConversation(text("now")) for player in players)
        assert [player.say("2").reward for player in players] == [2.0] * 40


def test_calls_are_streamed_and_come_back(folder):
    """Two calls at once with their results, by OpenAI's client, in the form that chat templates read. Would not catch
    a client that joins parts of arguments wrongly: they come in one.
    """
    with EnvironmentsHere(source(folder, "streams").host()) as here:
        player = Player(here)
        assert isinstance(player.opening, InitialConversation) and player.opening.tools[0]["function"]["name"] == "add"
        answer = player.say("", ToolCall("add", {"a": 1}), ToolCall("add", {"a": 3}))
        assert isinstance(answer, Observation) and [message["role"] for message in answer.messages] == ["tool"] * 2
        assert answer.messages[1]["content"] == "7" and player.say("done").is_done


@pytest.mark.parametrize(
    ("name", "turns", "cause", "reason"),
    [
        ("raises", 0, "raised", "ValueError: no more"),
        ("cancels", 0, "raised", "the agent raised CancelledError"),
        ("stays", 0, "timed_out", "multi_turn.tool_timeout_s=1"),
        ("behind", 0, "raised", "ValueError: no more"),
        ("asks_nothing", 0, "no_answer", "without a request"),
        ("sleeps", 0, "timed_out", "multi_turn.tool_timeout_s=1"),
        ("another_reward", 1, "no_answer", "must return a finite number or None, not 'good'"),
    ],
)
def test_what_an_agent_does_wrong_costs_its_episode(folder, name, turns, cause, reason):
    """Would not catch an agent that holds the interpreter's lock: the keeper ends its process."""
    with EnvironmentsHere(source(folder, name, timeout_s=1.0).host()) as here:
        player = Player(here)
        answer = [player.opening, *(player.say("1") for _ in range(turns))][-1]
    assert isinstance(answer, EpisodeFailure) and answer.cause == cause and reason in answer.reason


def test_requests_that_cannot_be_answered_are_refused_and_counted(folder):
    """Several answers, stops, other formats, another key, a reward that is none: each has its status. Would not catch
    fields that OpenAI adds.
    """
    with EnvironmentsHere(source(folder, "is_refused").host()) as here:
        answer = Player(here).say("1")
    assert answer == Observation((), 2.25, is_done=True, counts={"agent_refused": 4.0, "agent_unauthorized": 1.0})


def body(**more: object) -> str:
    return json.dumps({"messages": [{"role": "user", "content": "x"}], **more})


CALL = [{"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": NaN}'}}]
DEEP = "[" * 100_000
BAD_BODIES = {
    "": "Expecting value",
    DEEP: "100 levels deep",
    body(user="\ud83d"): "half of a surrogate pair, U\\+D83D",
    body(top=float("nan")): "Out of range float values",
    body(tools=[{"type": "function", "function": {}}]): "tools\\[0\\] must be",
    body(tools=[{"type": "web", "function": {"name": "a"}}]): "tools\\[0\\] must be",
    body(tools=[{"function": {"name": "a", "parameters": "b"}}]): "tools\\[0\\] must be",
    body(messages=[{"role": "assistant", "tool_calls": CALL}]): "tool_calls cannot be read: .*Out of range",
    body(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": 1, "arguments": "{}"}}]}]): "a name",
    body(x="y" * 200_000): "may have 200000 bytes",
}


def test_what_is_no_request_is_400_and_counted():
    """Each body by HTTP, with the rule in the answer. Would not catch bodies that never end: aiohttp bounds them."""

    assert (largest_body(1024), largest_body(1 << 30)) == (2 << 20, 64 << 20)

    async def statuses() -> list[tuple[int, str]]:
        endpoint = Endpoint(largest_body=200_000)
        session = await endpoint.open()
        headers = {"Authorization": f"Bearer {session.api_key}"}
        async with httpx.AsyncClient(headers=headers) as client:
            url = f"{session.base_url}/chat/completions"
            answers = [await client.post(url, content=each.encode()) for each in BAD_BODIES]
        assert session.num_refused == len(BAD_BODIES)
        await endpoint.stop()
        return [(answer.status_code, answer.json()["error"]["message"]) for answer in answers]

    for (status, reason), rule in zip(asyncio.run(statuses()), BAD_BODIES.values(), strict=True):
        assert status == 400 and re.search(rule, reason), reason


BROKEN = (
    b"Content-Length: 3\r\nContent-Encoding: gzip\r\n\r\nabc",
    b"Content-Length: 5000\r\n\r\n{",
    b"Transfer-Encoding: chunked\r\n\r\nZZZ\r\n",
)


def test_clients_that_send_no_http_or_hang_up_print_nothing(capfd, caplog):
    """What is not packed as it says, a body that is cut, no number of bytes; the session answers others afterwards.
    Would not catch a client that never ends: its agent has a limit.
    """

    async def served() -> tuple[int, int]:
        endpoint = Endpoint()
        session = await endpoint.open()
        address = session.base_url.split("/")[2].split(":")
        for rest in BROKEN:
            reader, writer = await asyncio.open_connection(*address)
            head = f"POST /v1/reward HTTP/1.1\r\nHost: x\r\nx-api-key: {session.api_key}\r\n"
            writer.write(head.encode() + rest)
            await writer.drain()
            if rest is not BROKEN[1]:
                assert b"400" in await reader.readline()
            else:
                await asyncio.sleep(0.1)
            writer.close()
        async with httpx.AsyncClient(headers={"x-api-key": session.api_key}) as client:
            answer = await client.post(f"{session.base_url}/reward", json={"reward": 1})
        await endpoint.stop()
        return answer.status_code, session.num_refused

    assert asyncio.run(served())[0] == 200
    assert capfd.readouterr().err == "" and not any(record.exc_info for record in caplog.records)


def test_other_conversations_begin_anew(folder):
    """Two at once, which wait for each other, and one that goes on with the first but has other tools. Would not catch
    more than a queue of them.
    """
    with EnvironmentsHere(source(folder, "branches").host()) as here:
        player = Player(here)
        begun = [player.say("1"), player.say("2"), player.say("3")]
        assert player.say("4").is_done
    assert all(isinstance(answer, Observation) and answer.messages == () for answer in begun)
    assert {answer.anew.messages[0]["content"] for answer in begun[:2]} == {"a", "b"}
    assert [message["content"] for message in begun[2].anew.messages] == ["one", "1", "more"]
    assert begun[2].anew.tools[0]["function"]["name"] == "add"


def test_a_client_that_asks_again_gets_the_same_answer(folder):
    """It gave up after half a second and has sent its request again. Would not catch a client that does not say so."""
    with EnvironmentProcesses(source(folder, "retries"), 1, 60.0, opens=True) as processes:
        player = Player(processes)
        time.sleep(1.5)
        answer = player.say("late")
    assert answer == Observation((), 0.0, is_done=True)


def test_an_agent_may_be_a_process(folder):
    """Its task comes as JSON, its reward by POST; one that fails is quoted, one that hangs is killed with its child.

    Would not catch a process that leaves its session.
    """
    with EnvironmentProcesses(program(folder), 1, 60.0, opens=True) as processes:
        player = Player(processes, 1, way="well")
        assert player.opening == InitialConversation(text("well")) and player.say("3") == Observation(
            (), 3.0, is_done=True
        )
        failed = Player(processes, 2, way="fails").opening
        assert isinstance(failed, EpisodeFailure) and "exited with code 3; it said: about to fail" in failed.reason
    with EnvironmentsHere(program(folder, timeout_s=3.0).host()) as here:
        hung = Player(here, 3, way="hangs").opening
        assert isinstance(hung, EpisodeFailure) and hung.cause == "timed_out"
        left = [child for child in psutil.Process().children(recursive=True) if "sleep" in child.name()]
        assert all(child.status() == psutil.STATUS_ZOMBIE for child in left)


def test_a_lost_agent_is_started_again_and_must_ask_as_before(folder):
    """A fresh host with a recorded turn plays it to a new agent. Would not catch one that asks the same by chance."""
    with EnvironmentsHere(source(folder, "guess").host()) as here:
        first = Player(here, turns=3)
        first.say("3")
    with EnvironmentsHere(source(folder, "guess").host()) as here:
        again = Player.__new__(Player)
        vars(again).update(vars(first), environments=here)
        assert again.say("4") == Observation(text("no 1"))
    with EnvironmentsHere(source(folder, "blocking").host()) as here:
        vars(again).update(vars(first), environments=here)
        answer = again.say("4")
    assert isinstance(answer, EpisodeFailure) and answer.cause == "not_repeatable" and "began with" in answer.reason


def test_a_request_goes_on_with_what_was_said():
    """By hand: what an agent may add and what not. Would not catch contents that differ in white space alone."""
    turn = Turn("yes", (ToolCall("add", {"a": 1}),))
    read, answer = OpenAIChat().read, OpenAIChat().answer
    sent = answer(turn, 1)["choices"][0]["message"]
    counted = answer(Turn("yes", num_tokens=2, num_context=5), 1)["usage"]
    assert counted == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    before = read({"messages": [{"role": "user", "content": "?"}]})
    after = read({"messages": [*before.messages, sent, {"role": "tool", "content": "2"}]})
    assert after.messages[1] == turn.as_message()
    assert after.after(before, turn) == ({"role": "tool", "content": "2"},)
    for messages in (
        [*before.messages, sent],
        [{"role": "user", "content": "!"}, sent, {"role": "tool", "content": "2"}],
        [*before.messages, {"role": "assistant", "content": "no"}, {"role": "tool", "content": "2"}],
        [*before.messages, sent, {"role": "assistant", "content": "no"}],
        [*before.messages],
    ):
        assert read({"messages": messages}).after(before, turn) == ()
    other_tools = {"messages": after.messages, "tools": [{"function": {"name": "add"}}]}
    assert read(other_tools | {"messages": [*before.messages, sent]}).after(before, turn) == ()


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ([], "an object with a list of messages"),
        ({"messages": []}, "an object with a list of messages"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "must have a role of system, user, assistant, tool"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content must be text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "tool_calls cannot be read"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [1]}, r"tools\[0\] must be"),
        ({"messages": [{"role": "user", "content": "x"}], "logprobs": True}, "logprobs=True is not supported"),
    ],
)
def test_unreadable_requests_have_a_rule(body, rule):
    """Would not catch a field that is read and means something else."""
    with pytest.raises(ValueError, match=rule):
        OpenAIChat().read(body)


ADD = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}


def test_anthropics_messages_are_the_same_conversation():
    """By hand: a system text, a call with its result, blocks of text; what comes back goes on with it, whole or
    streamed. Would not catch a field that its client needs: docs/train/agents.md says when that was tried.
    """
    read, answer, stream = AnthropicMessages().read, AnthropicMessages().answer, AnthropicMessages().stream
    turn = Turn("sure", (ToolCall("add", {"a": 1}),), num_tokens=2, num_context=5)
    body = {"system": [{"type": "text", "text": "be brief"}], "messages": [{"role": "user", "content": "1+1?"}]}
    before, sent = read(body | {"tools": [ADD], "max_tokens": 9}), answer(turn, 3)
    assert [message["content"] for message in before.messages] == ["be brief", "1+1?"]
    assert before.tools[0]["function"] == {"name": "add", "description": "Add.", "parameters": {"type": "object"}}
    assert [block["type"] for block in sent["content"]] == ["text", "tool_use"] and sent["stop_reason"] == "tool_use"
    assert sent["usage"] == {"input_tokens": 5, "output_tokens": 2}
    result = {"type": "tool_result", "tool_use_id": "toolu_3_0", "content": [{"type": "text", "text": "2"}]}
    said = {"role": "assistant", "content": sent["content"]}
    further = [said, {"role": "user", "content": [result, {"type": "text", "text": "so?"}]}]
    after = read(body | {"tools": [ADD], "messages": [*body["messages"], *further]})
    new = after.after(before, turn)
    assert [(message["role"], message["content"]) for message in new] == [("tool", "2"), ("user", "so?")]
    assert answer(Turn(""), 1)["content"] == [{"type": "text", "text": ""}]
    events = [json.loads(event.partition("data: ")[2]) for event in stream(turn, 3, before)]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [event["type"] for event in events] == ["message_start", *block, *block, "message_delta", "message_stop"]
    assert json.loads(events[5]["delta"]["partial_json"]) == {"a": 1} and events[1]["content_block"]["text"] == ""
    for wrong in ({"messages": [{"role": "system", "content": "x"}]}, body | {"stop_sequences": ["x"]}):
        with pytest.raises(ValueError):
            read(wrong)


def test_anthropics_agents_are_served(folder):
    """Over HTTP, with its header of the key, an error in its form. Would not catch its client's own checks."""
    (folder / "agents.py").write_text(AGENTS + ANTHROPIC)
    with EnvironmentsHere(source(folder, "by_anthropic").host()) as here:
        player = Player(here)
        assert player.opening == InitialConversation(text("1+1?"))
        assert player.say("2") == Observation(
            (), 1.0, is_done=True, counts={"agent_refused": 1.0, "agent_unauthorized": 1.0}
        )


ANTHROPIC = """
async def by_anthropic(task, endpoint):
    async with httpx.AsyncClient(base_url=endpoint.anthropic_base_url, timeout=60) as client:
        body, key = {"messages": [{"role": "user", "content": "1+1?"}]}, {"x-api-key": endpoint.api_key}
        refused = await client.post("/v1/messages", json={}, headers=key)
        assert refused.status_code == 400 and refused.json()["type"] == "error"
        unknown = await client.post("/v1/messages", json=body, headers={"x-api-key": "other"})
        assert unknown.status_code == 401 and unknown.json()["error"]["type"] == "authentication_error"
        streamed = await client.post("/v1/messages", json=body | {"stream": True}, headers=key)
        assert streamed.text.startswith("event: message_start") and '"text": "2"' in streamed.text
    return 1.0
"""
