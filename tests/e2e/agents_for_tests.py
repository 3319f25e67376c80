"""Environments and agents of whole runs on the addition demo: try again, be late, fail, answer otherwise each time."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time

import httpx
import openai

MOST_TURNS = 3


class Retry:
    """A wrong sum is asked for again; each further turn costs a tenth."""

    def reset(self, row: dict) -> None:
        self.sum = row["ground_truth"]

    def step(self, turn):
        if turn.text == self.sum:
            return None, 1.0, True
        return "no=", -0.1, False


class Late(Retry):
    """As long as chance says."""

    def step(self, turn):
        time.sleep(random.random() / 50)
        return super().step(turn)


class Forbidden:
    """No environment may run."""

    def reset(self, row: dict) -> None:
        os._exit(9)

    def step(self, turn):
        os._exit(9)


class Fails(Retry):
    """One prompt in `every` ends its process, another raises."""

    def __init__(self, every: int = 16) -> None:
        self.every = every

    def reset(self, row: dict) -> None:
        super().reset(row)
        self.index = row["index"]

    def step(self, turn):
        if self.index % self.every == 1:
            os._exit(3)
        if self.index % self.every == 2:
            raise ValueError("no more")
        return super().step(turn)


class Flaky(Retry):
    """One episode in four fails, when it is played for the first time."""

    seen: set = set()

    def reset(self, row: dict) -> None:
        super().reset(row)
        self.task = (row["index"], row["sample"])

    def step(self, turn):
        if hash(self.task) % 4 == 0 and self.task not in self.seen:
            self.seen.add(self.task)
            raise RuntimeError("not now")
        return super().step(turn)


class Changes(Retry):
    """No process says the same as another."""

    def step(self, turn):
        said, reward, is_done = super().step(turn)
        return said and f"{os.getpid() % 1000}=", reward, is_done


class ThreeTries:
    """A wrong sum is asked for again, twice at most; the sooner the better."""

    def reset(self, row: dict) -> None:
        self.sum, self.turn = row["ground_truth"], 0

    def step(self, turn):
        self.turn += 1
        if turn.text == self.sum:
            return None, 1.0 - (self.turn - 1) / 10, True
        return (None, 0.0, True) if self.turn == MOST_TURNS else ("no=", 0.0, False)

    def cut(self, turn) -> float:
        return 1.0 - self.turn / 10 if turn.text == self.sum else 0.0


CLIENTS: dict[str, openai.AsyncOpenAI] = {}
"""By URL: making one takes longer than an episode."""


async def three_tries(task: dict, endpoint) -> float:
    """The same as an agent, by OpenAI's client."""
    if endpoint.base_url not in CLIENTS:
        CLIENTS[endpoint.base_url] = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="each episode has its own")
    create = CLIENTS[endpoint.base_url].with_options(api_key=endpoint.api_key).chat.completions.create
    messages = conversation(task)
    for turn in range(MOST_TURNS):
        try:
            answer = await create(model="policy", messages=messages)
        except openai.BadRequestError:  # nothing is left for another turn
            break
        said = answer.choices[0].message
        if said.content == task["ground_truth"]:
            return 1.0 - turn / 10
        messages += [said, {"role": "user", "content": "no="}]
    return 0.0


async def asks_others(task: dict, endpoint) -> float:
    """Asks again in two conversations of their own at once, and goes on with the first one afterwards."""
    client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    create, messages = client.chat.completions.create, conversation(task)
    said = [(await create(model="policy", messages=messages)).choices[0].message]
    others = [[{"role": "user", "content": f"{first}{messages[-1]['content']}"}] for first in "12"]
    answers = await asyncio.gather(*(create(model="policy", messages=other) for other in others))
    said += [answer.choices[0].message for answer in answers]
    messages += [said[0], {"role": "user", "content": "no="}]
    said.append((await create(model="policy", messages=messages)).choices[0].message)
    return sum(each.content == task["ground_truth"] for each in said) / len(said)


GRADE = 0.125
"""Which no sum of the others' rewards is."""


async def graded(task: dict, endpoint) -> float:
    """Asks until its episode has no tokens or turns left, and then grades itself."""
    client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages, reason = conversation(task), "stop"
    while reason == "stop":
        try:
            choice = (await client.chat.completions.create(model="policy", messages=messages)).choices[0]
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded"
            return GRADE
        reason = choice.finish_reason
        messages += [choice.message, {"role": "user", "content": "no="}]
    return 2 * GRADE


async def one_goes_on(task: dict, endpoint) -> float:
    """One episode in sixteen asks until nothing is left for it, and is late; the others end by themselves."""
    return await (graded if task["index"] % 16 == 0 and task["sample"] == 0 else three_tries)(task, endpoint)


class Told:
    """Never satisfied; gives the same grades as `graded` once it hears that nothing is left."""

    def reset(self, row: dict) -> None:
        self.played = 0

    def step(self, turn):
        assert not turn.is_cut
        self.played += 1
        return "no=", 0.0, False

    def cut(self, turn) -> float:
        assert turn.is_cut and self.played + (turn.num_tokens > 0)
        return 2 * GRADE if turn.num_tokens else GRADE


async def hangs_up(task: dict, endpoint) -> float:
    """Cancels its first request as soon as the endpoint has it, and asks the same again."""
    client, url = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key), httpx.URL(endpoint.base_url)
    asked = {"model": "policy", "messages": conversation(task)}
    head = f"Host: {url.host}\r\nAuthorization: Bearer {endpoint.api_key}\r\nContent-Length: {len(json.dumps(asked))}"
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(f"POST {url.path}/chat/completions HTTP/1.1\r\n{head}\r\n\r\n{json.dumps(asked)}".encode())
    await client.models.list()  # the reply comes after the endpoint has read what came before
    writer.close()
    return float((await client.chat.completions.create(**asked)).choices[0].message.content == task["ground_truth"])


async def fails_first(task: dict, endpoint) -> float:
    """One prompt in eight is never asked."""
    if task["index"] % 8 == 1:
        raise ValueError("not this one")
    return await three_tries(task, endpoint)


HUNG: list[dict] = []
"""The task of the agent that hangs."""


async def first_hangs(task: dict, endpoint) -> float:
    """The first agent of each process never asks."""
    if not HUNG:
        HUNG.append(task)
        await asyncio.sleep(10_000)
    return await three_tries(task, endpoint)


HOSTILE = (
    '{"messages": [{"role": "user", "content": "1"}], "tools": [{"type": "function", "function": {}}]}',
    '{"messages": [{"role": "user", "content": "\\ud83d"}]}',
    '{"messages": [{"role": "user", "content": "' + "1+2" * 5_000_000 + '"}]}',
    '{"messages": ' + "[" * 100_000,
    '{"messages": [{"role": "user", "content": "1"}], "tools": [{"function": {"name": "f", "x": NaN}}]}',
    "",
)


async def hostile(task: dict, endpoint) -> float:
    """Six of eight send what is no request; the seventh one's question is too long."""
    kind = (task["index"] + task["sample"]) % 8
    if kind < len(HOSTILE):
        async with httpx.AsyncClient(headers={"x-api-key": endpoint.api_key}, timeout=60) as client:
            answer = await client.post(f"{endpoint.base_url}/chat/completions", content=HOSTILE[kind].encode())
        raise ValueError(f"status {answer.status_code}")
    if kind == len(HOSTILE):
        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "1+2" * 300_000}])
    return await three_tries(task, endpoint)


async def forbidden(task: dict, endpoint) -> None:
    """No agent may run."""
    os._exit(9)


def conversation(task: dict) -> list[dict]:
    """The prompt of a task as messages."""
    prompt = task["prompt"]
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def main() -> None:
    """An agent as a program: one try; the reward comes by POST."""
    task, client = json.load(sys.stdin), openai.OpenAI()
    answer = client.chat.completions.create(model="policy", messages=conversation(task))
    client.post(
        "/reward", body={"reward": float(answer.choices[0].message.content == task["ground_truth"])}, cast_to=object
    )


if __name__ == "__main__":
    main()
