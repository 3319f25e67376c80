"""Agents of tests, and who plays episodes with them."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_rl.agents.agent_environment import AgentSource
from megatron_rl.agents.as_json import Answer, Played
from megatron_rl.agents.environment_host import TurnJob
from megatron_rl.agents.environment_source import EnvironmentProcesses, EnvironmentsHere
from megatron_rl.agents.observation import InitialConversation, Observation, ToolCall, Turn

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

def hangs_up_in_a_thread(task, endpoint):
    first, key = {"messages": [{"role": "user", "content": "first"}]}, {"x-api-key": endpoint.api_key}
    try:
        httpx.post(endpoint.base_url + "/chat/completions", json=first, headers=key, timeout=0.5)
    except httpx.ReadTimeout:
        asks(endpoint, openai.OpenAI)(model="any", messages=[{"role": "user", "content": "second"}])
    return 2.0

async def hangs_up(task, endpoint):
    create = asks(endpoint, retries=0)
    try:
        await create(model="any", messages=[{"role": "user", "content": "first"}], timeout=0.4)
    except openai.APITimeoutError:
        answer = await create(model="any", messages=[{"role": "user", "content": "second"}])
        return float(answer.choices[0].message.content)

async def reads_nothing(task, endpoint):
    try:
        await asks(endpoint, retries=0)(model="any", messages=[{"role": "user", "content": "one"}], timeout=0.4)
    except openai.APITimeoutError:
        return 1.0

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

async def graded(task, endpoint):
    create, messages, ends = asks(endpoint), [{"role": "user", "content": "?"}], []
    for _ in range(9):
        try:
            choice = (await create(model="any", messages=messages)).choices[0]
        except openai.BadRequestError as error:
            assert "maximum context length" in str(error)
            ends.append(error.code)
            continue
        ends.append(choice.finish_reason)
        messages += [choice.message, {"role": "user", "content": "more"}]
    assert ends[task["turns"] :] == ["context_length_exceeded"] * (9 - task["turns"]), ends
    return task["turns"] + ends.count("length") / 10

async def gives_up(task, endpoint):
    headers = {"x-api-key": endpoint.api_key}
    await httpx.AsyncClient().post(f"{endpoint.base_url}/reward", json={"reward": 0.5}, headers=headers)
    for _ in range(9):
        await asks(endpoint)(model="any", messages=[{"role": "user", "content": "?"}])

async def own_fault(task, endpoint):
    answer = await asks(endpoint)(model="any", messages=[{"role": "user", "content": "?"}])
    assert answer.choices[0].finish_reason == "stop"

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


def agents_in(tmp_path: Path) -> Path:
    """Write the agents into a folder."""
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
        return self._take(Turn(text, calls))

    def cut(self, text: str = "") -> Answer:
        """The last tokens of the episode; without a text the turn before has had them."""
        return self._take(Turn(text, num_tokens=len(text), is_cut=True), is_over=True)

    def _take(self, turn: Turn, is_over: bool = False) -> Answer:
        answer = self._play(turn, is_over)
        if isinstance(answer, Observation):
            self.before.append((turn, answer))
        return answer

    def _play(self, turn: Turn | None, is_over: bool = False) -> Answer:
        opening = self.opening if turn is not None and isinstance(self.opening, InitialConversation) else None
        job = TurnJob(self.episode, self.row, tuple(self.before), turn, opening, is_over=is_over)
        self.environments.play(7, job)
        [(number, answer)] = self.environments.take(waits=True)
        assert number == 7
        return answer


def text(content: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": content},)
