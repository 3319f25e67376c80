"""OpenAI's responses. Nothing is kept between requests: each has its whole conversation. No torch.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.agents.chat_request import MODEL, ChatRequest, Content, asked_tokens, known_tools, named_results
from megatron_rl.agents.image_parts import Images, content_of
from megatron_rl.agents.observation import Message, ToolCall, Turn, TurnOptions
from megatron_rl.agents.openai_chat import log_prob_entries, openai_error, openai_too_long
from megatron_rl.agents.request_fields import check_fields, is_text_only
from megatron_rl.plain_values import strict_json

STAGES = {"reasoning": 0, "message": 1, "function_call": 2}
"""Items of a turn of the policy, in their order."""
LOG_PROBS = "message.output_text.logprobs"
SUMMARIES = {"reasoning_text", "summary_text"}


class OpenAIResponses:
    """The protocol of `openai.OpenAI(...).responses`."""

    path = "/v1/responses"

    def read(self, body: Any, images: Images | None = None) -> ChatRequest:
        """Read a request. images: gets those that it shows; None: it may show none. Raises ValueError, with the
        reason, for one that gets no response.
        """
        sent = body.get("input") if isinstance(body, dict) else None
        items = [{"role": "user", "content": sent}] if isinstance(sent, str) else sent
        if not isinstance(items, list) or not items:
            raise ValueError("a request must be an object with an input: a text, or a list of items")
        check_fields(body)
        instructions = body.get("instructions")
        if instructions:
            items = [{"role": "system", "content": instructions}, *items]
        messages, calls = _messages(items, images)
        tools = body.get("tools") or []
        tools = known_tools([_schema(tool) for tool in tools] if isinstance(tools, list) else tools)
        include = body.get("include") or ()
        limit, is_text = asked_tokens(body.get("max_output_tokens")), is_text_only(body)
        options = TurnOptions(limit, LOG_PROBS in include, is_text)
        return ChatRequest(named_results(messages, calls), tools, body.get("stream") is True, options=options)

    def answer(self, turn: Turn, number: int) -> Content:
        """Return the policy's turn as a `response`."""
        return _response(turn, number, "incomplete" if turn.is_cut else "completed", list(_items(turn, number)))

    def stream(self, turn: Turn, number: int, request: ChatRequest) -> list[str]:
        """Return the policy's turn as the events of a response."""
        begun = {"response": _response(turn, number, "in_progress", []) | {"usage": None, "incomplete_details": None}}
        events = [("response.created", begun), ("response.in_progress", begun)]
        for place, item in enumerate(_items(turn, number)):
            events += _item_events(place, item)
        whole = self.answer(turn, number)
        events.append((f"response.{whole['status']}", {"response": whole}))
        numbered = [{"type": name, "sequence_number": place} | event for place, (name, event) in enumerate(events)]
        return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in numbered]

    def refusal(self, reason: str, kind: str) -> Content:
        """Return the body of an error."""
        return openai_error(reason, kind)

    def too_long(self, num_tokens: int) -> Content:
        """Return the body of the error of a conversation that is too long."""
        return openai_too_long("input", num_tokens)


def _response(turn: Turn, number: int, status: str, output: list[Content]) -> Content:
    read, sampled = turn.num_context, turn.num_tokens
    usage = {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + sampled,
    }
    head = {"id": f"resp_{number}", "object": "response", "created_at": 0, "model": MODEL, "status": status}
    settings = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {}, "instructions": None}
    ended = {"error": None, "incomplete_details": {"reason": "max_output_tokens"} if turn.is_cut else None}
    return head | settings | ended | {"temperature": None, "top_p": None, "output": output, "usage": usage}


def _items(turn: Turn, number: int) -> Iterator[Content]:
    if turn.reasoning_content:
        content = [{"type": "reasoning_text", "text": turn.reasoning_content}]
        yield {"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": content, "status": "completed"}
    status = "incomplete" if turn.is_cut else "completed"
    if turn.text or not turn.calls:
        part = {"type": "output_text", "text": turn.text, "annotations": [], "logprobs": log_prob_entries(turn)}
        yield {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": status, "content": [part]}
    for place, call in enumerate(turn.calls):
        own = {"id": f"fc_{number}_{place}", "call_id": f"call_{number}_{place}", "type": "function_call"}
        yield own | {"name": call.name, "arguments": json.dumps(call.arguments), "status": "completed"}


def _item_events(place: int, item: Content) -> Iterator[tuple[str, Content]]:
    """The events of one item: it is added, its text or arguments come whole, it is done."""
    where = {"output_index": place, "item_id": item["id"]}
    is_call = item["type"] == "function_call"
    nothing: Content = {"arguments": ""} if is_call else {"content": []}
    yield "response.output_item.added", {"output_index": place, "item": item | nothing | {"status": "in_progress"}}
    if is_call:
        name, arguments = "response.function_call_arguments", item["arguments"]
        yield f"{name}.delta", where | {"delta": arguments}
        yield f"{name}.done", where | {"arguments": arguments, "name": item["name"]}
    else:
        [part] = item["content"]
        name, where = f"response.{part['type']}", where | {"content_index": 0}
        log_probs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        yield "response.content_part.added", where | {"part": part | {"text": ""}}
        yield f"{name}.delta", where | {"delta": part["text"]} | log_probs
        yield f"{name}.done", where | {"text": part["text"]} | log_probs
        yield "response.content_part.done", where | {"part": part}
    yield "response.output_item.done", {"output_index": place, "item": item}


def _schema(tool: Any) -> Any:
    """A tool in the form of chat templates; others stay as they are, and are refused."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return tool
    fields = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": fields}


def _messages(items: list[Any], images: Images | None) -> tuple[list[Message], list[dict[str, str]]]:
    """Return messages of chat templates, and of each the names of its calls by id. Raises ValueError for others."""
    messages, calls = list[Message](), list[dict[str, str]]()
    turn, stage = Turn(""), -1
    for place, item in enumerate([*items, {"role": "user", "content": ""}]):
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        own = STAGES.get(str(kind), -1) if kind != "message" or item.get("role") == "assistant" else -1
        if stage >= 0 and (own < stage or own == stage < STAGES["function_call"]):
            messages.append(turn.as_message())
            turn, stage = Turn(""), -1
        if place == len(items):
            break
        if own >= 0:
            calls += [{}] if stage < 0 else []
            turn, stage = _with_item(place, turn, item), own
            calls[-1] |= {str(item.get("call_id")): turn.calls[-1].name} if kind == "function_call" else {}
        else:
            messages.append(_message(place, item, images))
            calls.append({})
    return messages, calls


def _with_item(place: int, turn: Turn, item: Mapping[str, Any]) -> Turn:
    """Return a turn of the policy with one more of its items. Raises ValueError for one that cannot be read."""
    match item.get("type"):
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") in SUMMARIES]
            return replace(turn, reasoning_content="".join(text for text in texts if isinstance(text, str)))
        case "function_call":
            try:
                call = ToolCall(item["name"], strict_json(item["arguments"]))
                if not isinstance(call.name, str) or not isinstance(call.arguments, dict):
                    raise ValueError("name must be a text, arguments a JSON object in a text")
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"input[{place}], a function_call, cannot be read: {error!r:.80}") from None
            return replace(turn, calls=(*turn.calls, call))
    text = content_of(f"input[{place}].content", item.get("content"), None)
    assert isinstance(text, str)  # without images it is one
    return replace(turn, text=text)


def _message(place: int, item: Any, images: Images | None) -> Message:
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "function_call_output":
        content = content_of(f"input[{place}].output", item.get("output"), images)
        return {"role": "tool", "content": content, "tool_call_id": str(item.get("call_id"))}
    role = item.get("role") if kind == "message" else None
    role = "system" if role == "developer" else role
    if role not in ("system", "user"):
        kinds = "message (role user, assistant, system or developer), reasoning, function_call, function_call_output"
        raise ValueError(f"input[{place}] must be one of: {kinds}; it is {item!r:.80}")
    return {"role": role, "content": content_of(f"input[{place}].content", item.get("content"), images)}
