"""What messages have and a chat template leaves out: it would be dropped from what is learned without a word."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

KNOWN = ("role", "content", "name", "id", "tool_call_id")
"""Fields of the assistant's messages that need not stand in a text; `content` is compared by its own rule."""


def unwritten_fields(
    answers: Sequence[Mapping[str, Any]], counted: str, tools: Sequence[Mapping[str, Any]], text: str
) -> tuple[str, ...]:
    """Return the fields of responses that hold text of which `counted` has nothing, and `tools` where a text has none
    of their names.
    """
    fields = dict.fromkeys(field for answer in answers for field in _missing(answer, counted))
    names = tool_names(tools)
    if names and not any(name in text for name in names):
        fields["tools"] = None
    return tuple(fields)


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of tools, from their schemas."""
    return [name for tool in tools for name in _names(tool)]


def _missing(answer: Mapping[str, Any], counted: str) -> Iterator[str]:
    for field, value in answer.items():
        if field in KNOWN:
            continue
        if isinstance(value, str):
            # A template may write a line break or a quote of it in another way.
            if (lines := value.split()) and not _occurs(value, counted, lines):
                yield field
        elif field in ("tool_calls", "function_call"):
            calls = value if isinstance(value, list) else [value]
            if any(name not in counted for each in calls for name in _names(each)):
                yield field


def _occurs(value: str, counted: str, words: Sequence[str]) -> bool:
    return value.strip() in counted or json.dumps(value)[1:-1] in counted or "".join(words) in "".join(counted.split())


def _names(value: Any) -> list[str]:
    """The name of a call or of a tool."""
    if not isinstance(value, Mapping):
        return []
    function = value.get("function")
    own = function if isinstance(function, Mapping) else value
    return [own["name"]] if isinstance(own.get("name"), str) else []
