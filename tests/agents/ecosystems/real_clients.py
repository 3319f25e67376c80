"""Agents of real clients: each streams, calls a tool, limits its last turn, and may first cancel a request."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import agents
import anthropic
import openai

agents.set_tracing_disabled(True)
SCHEMA = {"type": "object", "properties": {"terms": {"type": "string"}}, "required": ["terms"]}
FUNCTION = {"name": "add", "description": "Add.", "parameters": SCHEMA}
LONGEST, SHORTEST = 64, 1
"""Tokens of a turn, and of the last one."""


@agents.function_tool
def add(terms: str) -> str:
    """Add."""
    return str(sum(map(int, terms.split("+"))))


def result(terms: str) -> str:
    return str(sum(map(int, terms.split("+"))))


async def by_chat(messages: list[Any], endpoint: Any, has_tools: bool) -> str:
    client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    tools = {"tools": [{"type": "function", "function": FUNCTION}]} if has_tools else {}
    create, calls = client.chat.completions.create, True
    while calls:
        text, calls = "", {}
        async for chunk in await create(model="policy", messages=messages, stream=True, **tools):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for call in choice.delta.tool_calls or []:
                    known = calls.setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
                    known["arguments"] += call.function.arguments or ""
        made = [
            {"id": call["id"], "type": "function", "function": {name: call[name] for name in ("name", "arguments")}}
            for call in calls.values()
        ]
        messages.append({"role": "assistant", "content": text} | ({"tool_calls": made} if made else {}))
        for call in calls.values():
            told = result(eval(call["arguments"])["terms"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": told})
    messages.append({"role": "user", "content": "="})
    last = await create(model="policy", messages=messages, max_tokens=SHORTEST, logprobs=True, **tools)
    assert len(last.choices[0].logprobs.content) == last.usage.completion_tokens == SHORTEST, last
    return text


async def by_messages(messages: list[Any], endpoint: Any, has_tools: bool) -> str:
    client = anthropic.AsyncAnthropic(base_url=endpoint.anthropic_base_url, api_key=endpoint.api_key)
    tool = {"name": "add", "description": "Add.", "input_schema": SCHEMA}
    more, reason = {"model": "policy"} | ({"tools": [tool]} if has_tools else {}), "tool_use"
    while reason == "tool_use":
        async with client.messages.stream(max_tokens=LONGEST, messages=messages, **more) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            said = await stream.get_final_message()
        reason = said.stop_reason
        calls = [block for block in said.content if block.type == "tool_use"]
        told = [
            {"type": "tool_result", "tool_use_id": call.id, "content": result(call.input["terms"])} for call in calls
        ]
        messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": told or "="}]
    last = await client.messages.create(max_tokens=SHORTEST, messages=messages, **more)
    assert last.usage.output_tokens == SHORTEST, last
    return text


async def by_responses(messages: list[Any], endpoint: Any, has_tools: bool) -> str:
    client = openai.AsyncOpenAI(base_url=endpoint.session_url, api_key="any")
    tools = {"tools": [{"type": "function", **FUNCTION}]} if has_tools else {}
    create, calls = client.responses.create, True
    while calls:
        async for event in await create(model="policy", input=messages, stream=True, **tools):
            said = getattr(event, "response", None)
        calls = [item for item in said.output if item.type == "function_call"]
        messages += [item.model_dump(exclude_none=True) for item in said.output]
        for call in calls:
            told = result(eval(call.arguments)["terms"])
            messages.append({"type": "function_call_output", "call_id": call.call_id, "output": told})
    messages.append({"role": "user", "content": "="})
    last = await create(model="policy", input=messages, max_output_tokens=SHORTEST, **tools)
    assert last.usage.output_tokens == SHORTEST, last
    return said.output_text


async def by_openai_agents(messages: list[Any], endpoint: Any, has_tools: bool) -> str:
    """Its runner raises where a limit cuts a turn, so none does."""
    client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    model = agents.OpenAIResponsesModel(model="policy", openai_client=client)
    given = {"model": model, "tools": [add] if has_tools else []}
    agent = agents.Agent(name="adder", model_settings=agents.ModelSettings(max_tokens=LONGEST), **given)
    running = agents.Runner.run_streamed(agent, input=messages)
    async for _ in running.stream_events():
        pass
    return running.final_output


CLIENTS: dict[str, Callable[..., Coroutine[Any, Any, str]]] = {
    "chat": by_chat,
    "messages": by_messages,
    "responses": by_responses,
    "openai_agents": by_openai_agents,
}


async def run(task: dict[str, Any], endpoint: Any, client: str | None = None, trains: bool = False) -> float:
    """Play with one client, or with that of the task's number. trains: without tools."""
    prompt = task["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    play = CLIENTS[client or list(CLIENTS)[task["index"] % len(CLIENTS)]](messages, endpoint, not trains)
    return float(await play == task["ground_truth"])
