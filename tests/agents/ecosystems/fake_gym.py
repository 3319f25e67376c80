"""NeMo Gym's contract by a fake of it: an agent server, a resources server and a model server, which speak HTTP.

`run` is what a user writes: it hands a row to the agent server, with the URL of its policy in the metadata that Gym
passes on, as one model server serves all rollouts. `python fake_gym.py FILE` serves until its input ends; it prints the
agent server's URL and appends each verdict to FILE.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path

import aiohttp
from aiohttp import web

MOST_TURNS = 3


async def run(task: dict, endpoint, url: str) -> float:
    """Have Gym play a row; returns the reward of its verdict."""
    given = {"input": list(task["prompt"]) if not isinstance(task["prompt"], str) else task["prompt"]}
    params = given | {"metadata": {"policy_url": endpoint.session_url}, "temperature": 1.0}
    body = {"responses_create_params": params, "ground_truth": task["ground_truth"]}
    async with aiohttp.ClientSession() as client, client.post(f"{url}/run", json=body) as reply:
        reply.raise_for_status()
        return (await reply.json())["reward"]


async def posted(url: str, body: dict) -> dict:
    """Return the JSON that a server replies."""
    async with aiohttp.ClientSession() as client, client.post(url, json=body) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


def said(response: dict) -> str:
    """Return the text of a response."""
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts if part["type"] == "output_text")


class Resources:
    """Keeps the task of each session, replies to tries and verifies the last response."""

    def __init__(self, verdicts: Path) -> None:
        self._verdicts, self._sessions, self._numbers = verdicts, {}, itertools.count()

    async def seed_session(self, request: web.Request) -> web.Response:
        number = next(self._numbers)
        self._sessions[number] = (await request.json())["ground_truth"]
        return web.json_response({"session": number})

    async def check(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"output": "" if body["said"] == self._sessions[body["session"]] else "no="})

    async def verify(self, request: web.Request) -> web.Response:
        body = await request.json()
        truth, text = self._sessions.pop(body["session"]), said(body["response"])
        tries = sum(item.get("role") == "user" for item in body["responses_create_params"]["input"])
        verdict = {"reward": (1.25 - tries / 4) * (text == truth), "said": text, "truth": truth, "tries": tries}
        with self._verdicts.open("a") as file:
            file.write(json.dumps(verdict) + "\n")
        return web.json_response(body | verdict)


async def model(request: web.Request) -> web.Response:
    """Pass a request on to the policy of its rollout."""
    body = await request.json()
    return web.json_response(await posted(f"{body['metadata']['policy_url']}/responses", body))


class Agent:
    """Asks the model, lets the resources check what it says, and asks again."""

    def __init__(self, resources: str, model: str) -> None:
        self._resources, self._model = resources, model

    async def run(self, request: web.Request) -> web.Response:
        body = await request.json()
        params, seed = body["responses_create_params"], {"ground_truth": body["ground_truth"]}
        session = (await posted(f"{self._resources}/seed_session", seed))["session"]
        items = params["input"] if isinstance(params["input"], list) else [{"role": "user", "content": params["input"]}]
        for turn in range(MOST_TURNS):
            response = await posted(f"{self._model}/v1/responses", params | {"input": items})
            checked = await posted(f"{self._resources}/check", {"session": session, "said": said(response)})
            if not checked["output"] or turn == MOST_TURNS - 1:
                break
            items = [*items, *response["output"], {"role": "user", "content": checked["output"]}]
        told = {"session": session, "responses_create_params": params | {"input": items}, "response": response}
        return web.json_response(await posted(f"{self._resources}/verify", told))


async def served(handlers: dict) -> str:
    """Serve handlers by their paths on a free port; returns the URL."""
    app = web.Application(client_max_size=1 << 24)
    app.add_routes([web.post(path, handler) for path, handler in handlers.items()])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


async def main(verdicts: Path) -> None:
    """Serve the three until standard input ends."""
    own = Resources(verdicts)
    resources = await served({"/seed_session": own.seed_session, "/check": own.check, "/verify": own.verify})
    agent = Agent(resources, await served({"/v1/responses": model}))
    print(await served({"/run": agent.run}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
