"""OpenAI's chat completions. What is not sampling is read; sampling is the run's. No torch.

https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
from megatron_rl.plain_values import strict_json

ROLES = ("system", "user", "assistant", "tool")


class OpenAIChat:
    """The protocol of `openai.OpenAI(...).chat.completions`."""

    path = "/v1/chat/completions"

    def read(self, body: Any, images: Images | None = None) -> ChatRequest:
        """Read a request. images: gets those that it shows; None: it may show none. Raises ValueError, with the rule,
        for one that cannot be answered.
        """
        body = object_with_messages(body)
        tools = known_tools(body.get("tools"))
        messages = [_message(place, message, images) for place, message in enumerate(body["messages"])]
        options = body.get("stream_options") or {}
        with_usage = isinstance(options, dict) and options.get("include_usage") is True
        limit = asked_tokens(body.get("max_completion_tokens"), body.get("max_tokens"))
        options = TurnOptions(limit, body.get("logprobs") is True, is_text_only(body))
        named = named_results(messages, map(_calls, body["messages"]))
        return ChatRequest(named, tools, body.get("stream") is True, with_usage, options)

    def answer(self, turn: Turn, number: int) -> Content:
        """Return the policy's turn as a `chat.completion`."""
        message: Content = {"role": "assistant", "content": turn.text or None if turn.calls else turn.text}
        if turn.reasoning_content:
            message["reasoning_content"] = turn.reasoning_content
        if turn.calls:
            message["tool_calls"] = _sent_calls(turn, number)
        choice = {"index": 0, "message": message, "finish_reason": _reason(turn), "logprobs": _log_probs(turn)}
        return _head("chat.completion", number) | {"choices": [choice], "usage": _usage(turn)}

    def stream(self, turn: Turn, number: int, request: ChatRequest) -> list[str]:
        """Return the policy's turn as events with parts, `chat.completion.chunk`."""
        text: Content = {"role": "assistant", "content": turn.text}
        deltas: list[tuple[Content, str | None]] = [(text, None)]
        if turn.reasoning_content:
            deltas.insert(0, ({"role": "assistant", "reasoning_content": turn.reasoning_content}, None))
        for place, call in enumerate(_sent_calls(turn, number)):
            deltas.append(({"tool_calls": [{"index": place} | call]}, None))
        deltas.append(({}, _reason(turn)))
        head = _head("chat.completion.chunk", number)
        parts = [head | {"choices": [{"index": 0, "delta": delta, "finish_reason": end}]} for delta, end in deltas]
        for part, (delta, _) in zip(parts, deltas, strict=True):
            part["choices"][0]["logprobs"] = _log_probs(turn) if delta is text else None
        if request.with_usage:
            parts.append(head | {"choices": [], "usage": _usage(turn)})
        return [*(f"data: {json.dumps(part)}\n\n" for part in parts), "data: [DONE]\n\n"]

    def refusal(self, reason: str, kind: str) -> Content:
        """Return the body of an error."""
        return openai_error(reason, kind)

    def too_long(self, num_tokens: int) -> Content:
        """Return the body of the error that OpenAI's models give to a conversation that is too long."""
        return openai_too_long("messages", num_tokens)


def openai_error(reason: str, kind: str, param: str | None = None, code: str | None = None) -> Content:
    """Return the body of an error."""
    return {"error": {"message": reason, "type": kind, "param": param, "code": code}}


def openai_too_long(param: str, num_tokens: int) -> Content:
    """Return the body of the error of a conversation that is too long. param: the field with the conversation."""
    reason = f"This model's maximum context length is {num_tokens} tokens: {NO_TOKENS_LEFT}."
    return openai_error(reason, "invalid_request_error", param, "context_length_exceeded")


def _head(kind: str, number: int) -> Content:
    return {"id": f"chatcmpl-{number}", "object": kind, "created": 0, "model": MODEL}


def _reason(turn: Turn) -> str:
    return "length" if turn.is_cut else "tool_calls" if turn.calls else "stop"


def _usage(turn: Turn) -> Content:
    read, drawn = turn.num_context, turn.num_tokens
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}


def log_prob_entries(turn: Turn) -> list[Content]:
    """Return the sampled tokens of a turn with their log-probs, where they were asked for."""
    return [
        {"token": text, "logprob": value, "bytes": list(text.encode(errors="replace")), "top_logprobs": []}
        for text, value in turn.drawn
    ]


def _log_probs(turn: Turn) -> Content | None:
    return {"content": log_prob_entries(turn), "refusal": None} if turn.drawn else None


def _sent_calls(turn: Turn, number: int) -> list[Content]:
    """The calls of a turn as OpenAI sends them: with an id, and arguments as a text."""
    return [
        {
            "id": f"call_{number}_{place}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for place, call in enumerate(turn.calls)
    ]


def _message(place: int, sent: Any, images: Images | None) -> Message:
    """One message in the form of chat templates. Raises ValueError for what is none."""
    role = sent.get("role") if isinstance(sent, Mapping) else None
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise ValueError(f"messages[{place}] must have a role of {', '.join(ROLES)}; it is {sent!r:.80}")
    shown = None if role == "assistant" else images
    message: Message = {"role": role, "content": content_of(f"messages[{place}].content", sent.get("content"), shown)}
    message |= {name: sent[name] for name in ("name", "tool_call_id") if isinstance(sent.get(name), str)}
    thoughts = [sent[name] for name in ("reasoning_content", "reasoning") if sent.get(name)]
    if role == "assistant" and thoughts:
        message["reasoning_content"] = one_text(f"messages[{place}].reasoning_content", thoughts[0])
    calls = sent.get("tool_calls")
    if calls:
        try:
            functions = [call["function"] for call in calls]
            known = tuple(ToolCall(function["name"], strict_json(function["arguments"])) for function in functions)
            if not all(isinstance(call.name, str) for call in known):
                raise ValueError("a name must be a text")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"messages[{place}].tool_calls cannot be read: {error!r:.80}") from None
        message["tool_calls"] = Turn("", known).as_message()["tool_calls"]
    return message


def _calls(sent: Mapping[str, Any]) -> dict[str, str]:
    """Id -> name of the calls of a message that `_message` has read."""
    return {str(call.get("id")): call["function"]["name"] for call in sent.get("tool_calls") or ()}
