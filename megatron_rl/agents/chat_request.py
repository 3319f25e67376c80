"""Requests and answers of OpenAI's chat completions, as an agent exchanges them with its policy. No torch.

https://platform.openai.com/docs/api-reference/chat: what is not sampling is read; sampling is the run's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.agents.observation import FOLLOWING, Message, ToolCall, Turn

Content = dict[str, Any]

ONLY: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logprobs": (None, False),
    "tool_choice": (None, "auto", "none"),
    "stop": (None, [], ""),
}
"""Fields that would change what is sampled, and the values under which nothing would change."""

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class ChatRequest:
    """What an agent asks: its whole conversation and its tools, in the form of chat templates."""

    messages: tuple[Message, ...]
    tools: tuple[Content, ...] = ()
    streams: bool = False
    with_usage: bool = False

    @classmethod
    def of(cls, body: Any) -> ChatRequest:
        """Read a request. Raises ValueError, with the rule, for one that cannot be answered."""
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
            raise ValueError("a request must be an object with a list of messages")
        for name, allowed in ONLY.items():
            if body.get(name) not in allowed:
                raise ValueError(f"{name}={body[name]!r:.80} is not possible here: one answer is drawn as the run does")
        shape = body.get("response_format")
        if shape is not None and shape != {"type": "text"}:
            raise ValueError("response_format must be text: the policy is not constrained")
        tools = body.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) and "function" in tool for tool in tools):
            raise ValueError("tools must be a list of objects with a function")
        messages = tuple(_message(place, message) for place, message in enumerate(body["messages"]))
        options = body.get("stream_options") or {}
        with_usage = isinstance(options, dict) and options.get("include_usage") is True
        return cls(messages, tuple(tools), body.get("stream") is True, with_usage)

    def after(self, before: ChatRequest, turn: Turn) -> tuple[Message, ...]:
        """Return the messages that follow `before` and the policy's turn; none where this is another conversation."""
        said = (*before.messages, turn.as_message())
        new = self.messages[len(said) :]
        goes_on = self.tools == before.tools and self.messages[: len(said)] == said
        return new if goes_on and all(message["role"] in FOLLOWING for message in new) else ()


def completion(turn: Turn, number: str, model: str) -> Content:
    """Return the answer to a request: the policy's turn as a `chat.completion`. number: of the answer."""
    message: Content = {"role": "assistant", "content": turn.text or None if turn.calls else turn.text}
    if turn.calls:
        message["tool_calls"] = _sent_calls(turn.calls, number)
    choice = {"index": 0, "message": message, "finish_reason": _reason(turn), "logprobs": None}
    head = {"id": number, "object": "chat.completion", "created": 0, "model": model}
    return head | {"choices": [choice], "usage": usage(turn)}


def chunks(turn: Turn, number: str, model: str, with_usage: bool) -> list[Content]:
    """Return the answer as the parts of a stream, `chat.completion.chunk`. with_usage: the last one has the usage."""
    deltas: list[tuple[Content, str | None]] = [({"role": "assistant", "content": turn.text}, None)]
    for place, call in enumerate(_sent_calls(turn.calls, number)):
        deltas.append(({"tool_calls": [{"index": place} | call]}, None))
    deltas.append(({}, _reason(turn)))
    head = {"id": number, "object": "chat.completion.chunk", "created": 0, "model": model}
    parts = [head | {"choices": [{"index": 0, "delta": delta, "finish_reason": end}]} for delta, end in deltas]
    return [*parts, head | {"choices": [], "usage": usage(turn)}] if with_usage else parts


def usage(turn: Turn) -> Content:
    """Return the numbers of tokens that the policy has read and drawn."""
    read, drawn = turn.num_context, turn.num_tokens
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}


def refusal(reason: str, kind: str = "invalid_request_error") -> Content:
    """Return the body of an error."""
    return {"error": {"message": reason, "type": kind, "param": None, "code": None}}


def _reason(turn: Turn) -> str:
    return "tool_calls" if turn.calls else "stop"


def _sent_calls(calls: Sequence[ToolCall], number: str) -> list[Content]:
    """The calls of a turn as OpenAI sends them: with an id, and arguments as a text."""
    return [
        {
            "id": f"call_{number}_{place}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for place, call in enumerate(calls)
    ]


def _message(place: int, sent: Any) -> Message:
    """One message in the form of chat templates. Raises ValueError for what is none."""
    role = sent.get("role") if isinstance(sent, Mapping) else None
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise ValueError(f"messages[{place}] must have a role of {', '.join(ROLES)}; it is {sent!r:.80}")
    message: Message = {"role": role, "content": _text(place, sent.get("content"))}
    message |= {name: sent[name] for name in ("name", "tool_call_id") if isinstance(sent.get(name), str)}
    calls = sent.get("tool_calls")
    if calls:
        try:
            functions = [call["function"] for call in calls]
            known = tuple(ToolCall(function["name"], json.loads(function["arguments"])) for function in functions)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"messages[{place}].tool_calls cannot be read: {error!r:.80}") from None
        message["tool_calls"] = Turn("", known).as_message()["tool_calls"]
    return message


def _text(place: int, content: Any) -> str:
    """The content of a message as one text: a text, nothing, or parts of text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    known = [text for text in texts if isinstance(text, str)]
    if len(known) < len(texts):
        raise ValueError(f"messages[{place}].content must be text; it is {content!r:.80}")
    return "".join(known)
