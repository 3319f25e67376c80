"""Messages of conversations, checked and without the nulls that parquet adds."""

from __future__ import annotations

import json
from typing import Any

from megatron_rl.data.message_form import THOUGHT_FIELDS
from megatron_rl.data.row_problems import RowProblem

Message = dict[str, Any]
INSTRUCTIONS = ("system", "developer")
ROLES = (*INSTRUCTIONS, "user", "assistant", "tool")


def read_messages(value: Any, field: str, image_mark: str | None = None) -> list[Message]:
    """A non-empty list of messages with role and content. Raises RowProblem.

    Parquet gives every message the fields of all messages, with null for those that it does not have, so fields that
    are null are taken out at any depth. Content in parts of type text is joined. A message that calls tools may have no
    content. image_mark: stands in the text for a part of type image; None: there may be none.
    """
    if value is None:
        raise RowProblem("missing", field, "null")
    if not isinstance(value, list):
        raise RowProblem("wrong_type", field, f"{_shown(value)}, and not a list of messages")
    if not value:
        raise RowProblem("no_messages", field, "[]")
    return [_message(message, f"{field}[{number}]", image_mark) for number, message in enumerate(value)]


def check_order(messages: list[Message], field: str) -> None:
    """Raise RowProblem for a conversation that no template can take."""
    before = "system"
    for number, message in enumerate(messages):
        role, place = message["role"], f"{field}[{number}]"
        if role in INSTRUCTIONS and before not in INSTRUCTIONS:
            raise RowProblem("misplaced_system", place, f"a {role} message after one of role {before}")
        if role == "tool" and before not in ("assistant", "tool"):
            raise RowProblem("stray_tool_message", place, f"it follows a message of role {before}")
        if role == "assistant" and not number:
            raise RowProblem("no_question", place, "the assistant speaks first")
        if role == "user" and not message["content"].strip():
            raise RowProblem("empty_prompt", f"{place}.content", repr(message["content"])[:80])
        before = role


def check_answers(messages: list[Message], field: str, first: int = 0) -> None:
    """Raise RowProblem unless the last message from `first` on is the assistant's and none of its messages is empty."""
    if len(messages) <= first or messages[-1]["role"] != "assistant":
        last = f"the last message is of role {messages[-1]['role']}" if len(messages) > first else "no response"
        raise RowProblem("unanswered", f"{field}[{len(messages) - 1}]", last)
    for number, message in enumerate(messages[first:], start=first):
        is_silent = not message["content"].strip() and not message.get("tool_calls")
        thinks = any(message.get(name) for name in THOUGHT_FIELDS)
        if message["role"] == "assistant" and is_silent and not thinks:
            raise RowProblem("empty_answer", f"{field}[{number}].content", repr(message["content"]))


def read_tools(value: Any, field: str) -> list[dict[str, Any]] | None:
    """The tools of a row: null, a list of objects, or either as JSON. Raises RowProblem."""
    try:
        if isinstance(value, str):
            value = json.loads(value) if value.strip() else None
        if isinstance(value, list):
            value = [json.loads(tool) if isinstance(tool, str) else tool for tool in value]
    except (ValueError, RecursionError) as error:
        raise RowProblem("wrong_type", field, f"text that is not JSON: {error}") from None
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowProblem("wrong_type", field, f"{_shown(value)}, and not a list of tools as objects")
    return [_without_nulls(tool) for tool in value]


def _message(value: Any, field: str, image_mark: str | None) -> Message:
    if not isinstance(value, dict):
        raise RowProblem("not_a_message", field, _shown(value))
    message: Message = _without_nulls(value)
    if not isinstance(message.get("role"), str):
        hint = "an object with from and value" if {"from", "value"} <= set(value) else "no role"
        raise RowProblem("not_a_message", f"{field}.role", hint)
    if message["role"] not in ROLES:
        raise RowProblem("unknown_role", f"{field}.role", repr(message["role"])[:60])
    content = message.get("content")
    if content is None:
        if not message.get("tool_calls"):
            raise RowProblem("not_a_message", f"{field}.content", "no content")
        content = ""
    if isinstance(content, list):
        places = (f"{field}.content[{number}]" for number in range(len(content)))
        content = "".join(_part(part, place, image_mark) for part, place in zip(content, places, strict=True))
    if not isinstance(content, str):
        raise RowProblem("content_not_text", f"{field}.content", _shown(content))
    return message | {"content": content}


def _part(part: Any, field: str, image_mark: str | None) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if kind == "text" else image_mark if kind == "image" else None
    if not isinstance(text, str):
        raise RowProblem("content_not_text", field, _shown(part))
    return text


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def _shown(value: Any) -> str:
    return f"{value!r:.80}"
