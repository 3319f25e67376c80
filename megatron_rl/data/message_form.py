"""The form in which a chat template takes messages: where it reads a thought, arguments and ids of calls.

Templates differ. A thought is read from `reasoning_content`, `reasoning`, `thinking`, or from the content between
marks. Arguments are an object or JSON text. Ids are free, have nine characters, or carry the tool's name. A template is
shown a few conversations once, and then gets what it reads, whatever form a file, an agent or the policy's turn has.
What it leaves out of an example would be dropped from what is learned without a word (`unwritten_fields`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Message = dict[str, Any]
Render = Callable[[list[Message]], str | None]
"""Returns what a template writes for a conversation; None where it refuses it."""

THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message that hold what the assistant thought before it answered."""
CONTENT = "content"
MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"))
"""Beginning and end of a thought inside of a response."""

NAMED = re.compile(r"functions\.(.+):(\d{1,8})")
"""The id of a call that carries the tool's name and its number among all calls, as Kimi-K2 writes it."""

QUESTION = {"role": "user", "content": "40817263951"}
ANSWER, THOUGHT, VALUE, TOOL = "73920485162", "50619283746", "26481957305", "tool84027"
"""Texts that templates write unchanged, and that occur nowhere else in a conversation."""

WRITTEN_OR_NOT = ("role", "content", "name", "id", "tool_call_id")
"""Fields of the assistant's messages that need not stand in a text; `content` is compared by its own rule."""


def thought_marks(template: str) -> tuple[str, str] | None:
    """Return the marks around thoughts that a template knows; None where it knows none."""
    return next((marks for marks in MARKS if marks[1] in template), None)


def is_plain(messages: Sequence[Message]) -> bool:
    """Return whether messages have a role and a content alone, which every template takes in one form."""
    special = {"tool_calls", "tool_call_id", *THOUGHT_FIELDS}
    return not any(special & message.keys() for message in messages if isinstance(message, Mapping))


@dataclass(frozen=True)
class MessageForm:
    """What a template takes.

    thoughts: the field that it reads, `CONTENT` for text between marks, "" where it writes none. marks: of thoughts.
    as_text: arguments are JSON text. ids: any | nine (characters) | named. is_null: the content of a message that only
    calls is null, and not "".
    """

    thoughts: str
    marks: tuple[str, str] | None
    as_text: bool = False
    ids: str = "any"
    is_null: bool = False

    @classmethod
    def probed(cls, template: str, render: Render) -> MessageForm:
        """Return the form of a template. render: renders with it, without the beginning of a response."""
        marks = thought_marks(template)
        forms = [(as_text, is_null) for is_null in (False, True) for as_text in (False, True)]
        as_text, is_null = next((each for each in forms if _is_written(render, *each)), forms[0])
        form = cls("", marks, as_text, _ids(render, as_text, is_null), is_null)
        fields = (*THOUGHT_FIELDS, *([CONTENT] if marks else []))
        return next((known for field in fields if _thinks(render, known := replace(form, thoughts=field))), form)

    def adapted(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages in this form. Raises ValueError for arguments of a call that are no JSON object."""
        adapted: list[Message] = []
        open_calls: list[tuple[Any, str, str]] = []
        num_calls = 0
        for message in messages:
            if message.get("role") == "assistant":
                message = self._thinking(message)
                if isinstance(message.get("tool_calls"), list):
                    sent = message["tool_calls"]
                    calls = [self._call(each, num_calls + place) for place, each in enumerate(sent)]
                    open_calls = [(_id(own), _id(new), _name(new)) for own, new in zip(sent, calls, strict=True)]
                    num_calls += len(calls)
                    is_null = self.is_null and not message.get(CONTENT)
                    message = message | {"tool_calls": calls} | ({CONTENT: None} if is_null else {})
            elif message.get("role") == "tool" and open_calls:
                message = _answering(message, open_calls)
            adapted.append(message)
        return adapted

    def _thinking(self, message: Message) -> Message:
        """Put a thought where the template reads it; a field that it does not read stays as it is."""
        thought = next((text for name in THOUGHT_FIELDS if isinstance(text := message.get(name), str) and text), "")
        if not thought or not self.thoughts or message.get(self.thoughts) == thought:
            return message
        if self.thoughts != CONTENT:
            return message | {self.thoughts: thought}
        assert self.marks is not None  # probed
        rest = {name: value for name, value in message.items() if name not in THOUGHT_FIELDS}
        return rest | {CONTENT: in_marks(self.marks, thought) + (message.get(CONTENT) or "")}

    def _call(self, sent: Any, number: int) -> Any:
        """A call in the template's form; number: among those of the conversation."""
        if not isinstance(sent, Mapping):
            return sent
        own = sent.get("function")
        function = dict(own) if isinstance(own, Mapping) else {n: v for n, v in sent.items() if n not in ("id", "type")}
        if "arguments" in function:
            function["arguments"] = self._arguments(function["arguments"], str(function.get("name")))
        given, name = sent.get("id"), str(function.get("name"))
        known = NAMED.fullmatch(given) if isinstance(given, str) else None
        number = int(known[2]) if known is not None and known[1] == name else number
        new = named_id(name, number) if self.ids == "named" else f"{number:09d}"
        is_kept = self.ids == "any" and isinstance(given, str) and given
        return {**sent, "type": "function", "id": given if is_kept else new, "function": function}

    def _arguments(self, given: Any, name: str) -> Any:
        if isinstance(given, str) and not self.as_text:
            try:
                read = json.loads(given) if given.strip() else {}
            except (ValueError, RecursionError):
                read = None
            if not isinstance(read, dict):
                raise ValueError(f"the arguments of the call {name} must be a JSON object; they are {given!r:.80}")
            return read
        return json.dumps(given, ensure_ascii=False) if self.as_text and not isinstance(given, str) else given


def named_id(name: str, number: int) -> str:
    """Return the id of `NAMED`."""
    return f"functions.{name}:{number}"


def in_marks(marks: tuple[str, str], thought: str) -> str:
    """Return a thought as templates write it before a response."""
    return f"{marks[0]}\n{thought}\n{marks[1]}\n\n"


def call(value: str, as_text: bool = False, name: str = TOOL) -> Message:
    """Return a call of a tool with one argument, `value`."""
    arguments: Any = {"key": value}
    return {
        "type": "function",
        "id": "000000001",
        "function": {"name": name, "arguments": json.dumps(arguments) if as_text else arguments},
    }


def _calling(known: Message, is_null: bool) -> Message:
    return {"role": "assistant", "content": None if is_null else "", "tool_calls": [known]}


def _is_written(render: Render, as_text: bool, is_null: bool) -> bool:
    """Whether the argument of a call is written, and not as Python writes an object."""
    text = render([QUESTION, _calling(call(VALUE, as_text), is_null)]) or ""
    return VALUE in text and f"'{VALUE}'" not in text


def _ids(render: Render, as_text: bool, is_null: bool) -> str:
    def text(own: str) -> str | None:
        answer = {"role": "tool", "tool_call_id": own, "name": TOOL, "content": ANSWER}
        return render([QUESTION, _calling(call(VALUE, as_text) | {"id": own}, is_null), answer])

    free, nine = text("call_one"), text("000000001")
    if free is None:
        return "any" if nine is None else "nine"
    return "named" if "call_one" in free and TOOL not in free else "any"


def _thinks(render: Render, form: MessageForm) -> bool:
    """Whether the template writes a thought that it is given in this form, before a response or before a call."""
    thinking = {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}
    if form.thoughts != CONTENT:
        thinking = {"role": "assistant", "content": ANSWER, form.thoughts: THOUGHT}
    calling = thinking | _calling(call(VALUE, form.as_text), is_null=False)
    shown = (render([QUESTION, *form.adapted([message])]) for message in (thinking, calling))
    return any(THOUGHT in (text or "") for text in shown)


def _answering(message: Message, open_calls: list[tuple[Any, str, str]]) -> Message:
    """A tool's message with the id and the name of the call that it answers, which is taken from `open_calls`."""
    own, name = message.get("tool_call_id"), message.get("name")
    tests = (lambda each: own is not None and own == each[0], lambda each: name == each[2], lambda each: True)
    place = next(n for test in tests for n, each in enumerate(open_calls) if test(each))
    _, new, known = open_calls.pop(place)
    return message | {"tool_call_id": new, "name": name or known}


def _id(sent: Any) -> Any:
    return sent.get("id") if isinstance(sent, Mapping) else None


def _name(sent: Any) -> str:
    function = sent.get("function") if isinstance(sent, Mapping) else None
    return str(function.get("name")) if isinstance(function, Mapping) else ""


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
    return [name for tool in tools for name in _names_of(tool)]


def _missing(answer: Mapping[str, Any], counted: str) -> Iterator[str]:
    for field, value in answer.items():
        if field in WRITTEN_OR_NOT:
            continue
        if isinstance(value, str):
            # A template may write a line break or a quote of it in another way.
            if (lines := value.split()) and not _occurs(value, counted, lines):
                yield field
        elif field in ("tool_calls", "function_call"):
            calls = value if isinstance(value, list) else [value]
            if any(name not in counted for each in calls for name in _names_of(each)):
                yield field


def _occurs(value: str, counted: str, words: Sequence[str]) -> bool:
    return value.strip() in counted or json.dumps(value)[1:-1] in counted or "".join(words) in "".join(counted.split())


def _names_of(value: Any) -> list[str]:
    """The name of a call or of a tool."""
    if not isinstance(value, Mapping):
        return []
    function = value.get("function")
    own = function if isinstance(function, Mapping) else value
    return [own["name"]] if isinstance(own.get("name"), str) else []
