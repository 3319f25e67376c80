"""Anthropic's messages. What is not sampling is read; sampling is the run's. No torch.

https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.agents.chat_request import (
    MODEL,
    NO_TOKENS_LEFT,
    ChatRequest,
    Content,
    asked_tokens,
    known_tools,
    named_results,
    object_with_messages,
    one_text,
)
from megatron_rl.agents.image_parts import Images, content_of
from megatron_rl.agents.observation import Message, ToolCall, Turn, TurnOptions
from megatron_rl.agents.request_fields import is_text_only


class AnthropicMessages:
    """The protocol of `anthropic.Anthropic(...).messages`."""

    path = "/v1/messages"

    def read(self, body: Any, images: Images | None = None) -> ChatRequest:
        """Read a request. images: gets those that it shows; None: it may show none. Raises ValueError, with the rule,
        for one that cannot be answered.
        """
        body = object_with_messages(body)
        tools = body.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) and "input_schema" in tool for tool in tools):
            raise ValueError("tools must be a list of objects with an input_schema")
        system = one_text("system", body.get("system"))
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        calls: list[dict[str, str]] = [{} for _ in messages]
        for place, message in enumerate(body["messages"]):
            own = _messages(place, message, images)
            messages += own
            calls += [_call_names(message), *({} for _ in own[1:])]
        known = known_tools([*map(_schema, tools)])
        limit = asked_tokens(body.get("max_tokens"))
        return ChatRequest(
            named_results(messages, calls),
            known,
            body.get("stream") is True,
            options=TurnOptions(limit, is_text=is_text_only(body)),
        )

    def answer(self, turn: Turn, number: int) -> Content:
        """Return the policy's turn as a message."""
        return _head(turn, number) | {"content": list(_blocks(turn, number)), "stop_reason": _reason(turn)}

    def stream(self, turn: Turn, number: int, request: ChatRequest) -> list[str]:
        """Return the policy's turn as the events of a message."""
        begun = _head(turn, number) | {"content": [], "stop_reason": None}
        events: list[tuple[str, Content]] = [("message_start", {"message": begun})]
        for place, block in enumerate(_blocks(turn, number)):
            kind = block["type"]
            nothing: Content = {"input": {}} if kind == "tool_use" else {kind: ""}
            delta = {"type": f"{kind}_delta", kind: block.get(kind)}
            delta = _input_delta(block["input"]) if kind == "tool_use" else delta
            events.append(("content_block_start", {"index": place, "content_block": block | nothing}))
            events.append(("content_block_delta", {"index": place, "delta": delta}))
            events.append(("content_block_stop", {"index": place}))
        ended = {"delta": {"stop_reason": _reason(turn), "stop_sequence": None}, "usage": _usage(turn)}
        events += [("message_delta", ended), ("message_stop", {})]
        return [f"event: {name}\ndata: {json.dumps({'type': name} | content)}\n\n" for name, content in events]

    def refusal(self, reason: str, kind: str) -> Content:
        """Return the body of an error."""
        return {"type": "error", "error": {"type": kind, "message": reason}}

    def too_long(self, num_tokens: int) -> Content:
        """Return the body of the error that Anthropic's models give to a conversation that is too long."""
        reason = f"prompt is too long: > {num_tokens} maximum: {NO_TOKENS_LEFT}"
        return self.refusal(reason, "invalid_request_error")


def _head(turn: Turn, number: int) -> Content:
    head = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": MODEL, "stop_sequence": None}
    return head | {"usage": _usage(turn)}


def _reason(turn: Turn) -> str:
    return "max_tokens" if turn.is_cut else "tool_use" if turn.calls else "end_turn"


def _usage(turn: Turn) -> Content:
    return {"input_tokens": turn.num_context, "output_tokens": turn.num_tokens}


def _input_delta(given: Content) -> Content:
    return {"type": "input_json_delta", "partial_json": json.dumps(given)}


def _blocks(turn: Turn, number: int) -> Iterator[Content]:
    if turn.reasoning_content:
        yield {"type": "thinking", "thinking": turn.reasoning_content, "signature": ""}
    if turn.text or not turn.calls:
        yield {"type": "text", "text": turn.text}
    for place, call in enumerate(turn.calls):
        yield {"type": "tool_use", "id": f"toolu_{number}_{place}", "name": call.name, "input": call.arguments}


def _schema(tool: Mapping[str, Any]) -> Content:
    """A tool in the form of chat templates."""
    function = {"name": tool.get("name"), "description": tool.get("description") or ""}
    return {"type": "function", "function": function | {"parameters": tool["input_schema"]}}


def _messages(place: int, sent: Any, images: Images | None) -> list[Message]:
    """One message as messages of chat templates: results of tools have their own. Raises ValueError for others."""
    role = sent.get("role") if isinstance(sent, Mapping) else None
    if role not in ("user", "assistant"):
        raise ValueError(f"messages[{place}] must have the role user or assistant; it is {sent!r:.80}")
    name, content = f"messages[{place}].content", sent.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    said, thoughts, calls, results = [], [], [], []
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use" and role == "assistant" and isinstance(block.get("input"), dict):
            calls.append(ToolCall(str(block.get("name")), block["input"]))
        elif kind == "tool_result" and role == "user":
            result = content_of(name, block.get("content"), images)
            results.append({"role": "tool", "content": result, "tool_call_id": str(block.get("tool_use_id"))})
        elif kind == "thinking" and role == "assistant":
            thoughts.append(one_text(name, block.get("thinking")))
        else:
            said.append(block)
    if role == "assistant":
        return [Turn(one_text(name, said), tuple(calls), reasoning_content="".join(thoughts)).as_message()]
    content = content_of(name, said, images)
    return [*results, *([{"role": "user", "content": content}] if content or not results else [])]


def _call_names(sent: Mapping[str, Any]) -> dict[str, str]:
    """Id -> name of the calls of a message that `_messages` has read."""
    content = sent.get("content")
    blocks = content if isinstance(content, list) else []
    return {str(block.get("id")): str(block.get("name")) for block in blocks if block.get("type") == "tool_use"}
