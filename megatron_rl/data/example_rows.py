"""Rows of example files as conversations or texts with their responses, checked. Pure; raises `RowProblem`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron_rl.data.image_sources import MARK, with_image_parts
from megatron_rl.data.messages import Message, check_answers, check_order, read_messages, read_tools
from megatron_rl.data.row_files import needed_value, value_of
from megatron_rl.data.row_problems import RowProblem
from megatron_rl.data.schemas import JUDGED, Columns

if TYPE_CHECKING:
    from megatron_rl.data.prompt_images import PromptImages, StoredImage


@dataclass(frozen=True)
class Text:
    """Plain text: a prompt, which may be empty, and the response that follows it."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Chat:
    """A conversation. Its responses, which may count, are the assistant's messages from number `first` on."""

    messages: list[Message]
    first: int
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class ExampleRow:
    """answers: one, or several for preferences, the best first, with one margin fewer. desirable: the label of each
    response, if labels are read. score: the response's, if scores are read. images: those that the prompt shows.
    """

    answers: tuple[Text | Chat, ...]
    margins: tuple[float, ...] = ()
    desirable: tuple[bool, ...] = ()
    score: float | None = None
    images: tuple[StoredImage, ...] = ()


class RowReader:
    """Reads the rows of files with the same columns. `schemas.NEEDED` lists the shapes of rows."""

    def __init__(self, columns: Columns, kind: str, as_chat: bool, images: PromptImages | None = None):
        """as_chat: whether prompts and responses that are both text become messages of user and assistant. images: what
        reads those of rows; None: rows are text.
        """
        self.columns = columns
        self.kind = kind
        self.as_chat = as_chat
        self.images = images
        self._image_mark = None if images is None else MARK

    def read(self, content: dict[str, Any]) -> ExampleRow:
        """The responses in a row. Raises RowProblem, with the field, if they cannot be used."""
        row = self._responses(content)
        if self.images is None:
            return row
        images = self.images.stored(value_of(content, self.images.column))
        return replace(row, answers=tuple(self._showing(answer, len(images)) for answer in row.answers), images=images)

    def _showing(self, answer: Text | Chat, num_images: int) -> Text | Chat:
        """The response with parts of type image in its prompt for the marks of images. Raises RowProblem."""
        uses = self.columns.names
        field = uses.get("messages") or uses.get("prompt") or uses.get("chosen") or uses["text"]
        if isinstance(answer, Text):
            if num_images:
                raise RowProblem("not_a_chat", field, f"text with {num_images} images")
            return answer
        for number, message in enumerate(answer.messages[answer.first :], start=answer.first):
            if message["role"] == "assistant" and MARK in message["content"]:
                raise RowProblem("image_in_answer", f"{field}[{number}].content", f"{message['content']!r:.80}")
        return replace(answer, messages=with_image_parts(answer.messages, num_images, field))

    def _responses(self, content: dict[str, Any]) -> ExampleRow:
        shape = self.columns.shape
        if shape in ("pair", "ranking"):
            answers, margins = self._pair(content) if shape == "pair" else self._ranking(content)
            return ExampleRow(answers, margins, (True, False) if self.kind == "labelled" else ())
        answer: Text | Chat
        if shape == "text":
            answer = Text("", self._text(content, "text", "empty_answer"))
        elif shape == "conversation":
            answer = self._conversation(content)
        else:
            answer = self._answer(content, self._value(content, "response"), self._name("response"))
        judge = JUDGED.get(self.kind)
        if judge == "label":
            return ExampleRow((answer,), desirable=(self._label(content),))
        return ExampleRow((answer,), score=self._number(content, "score") if judge == "score" else None)

    def _name(self, use: str) -> str:
        return self.columns.names[use]

    def _value(self, content: dict[str, Any], use: str) -> Any:
        return needed_value(content, self._name(use), ", and other rows have it" if use == "margin" else "")

    def _text(self, content: dict[str, Any], use: str, empty: str) -> str:
        value = self._value(content, use)
        if not isinstance(value, str):
            raise RowProblem("wrong_type", self._name(use), f"{value!r:.80}, and not text")
        if not value.strip():
            raise RowProblem(empty, self._name(use), repr(value)[:80])
        return value

    def _tools(self, content: dict[str, Any]) -> list[dict[str, Any]] | None:
        name = self.columns.names.get("tools")
        return None if name is None else read_tools(value_of(content, name), name)

    def _conversation(self, content: dict[str, Any]) -> Chat:
        name = self._name("messages")
        messages = read_messages(self._value(content, "messages"), name, self._image_mark)
        check_order(messages, name)
        check_answers(messages, name)
        # A label or a score is about the last response alone.
        first = 0 if self.kind == "examples" else len(messages) - 1
        return Chat(messages, first, self._tools(content))

    def _prompt(self, content: dict[str, Any]) -> str | list[Message]:
        value = self._value(content, "prompt")
        if isinstance(value, str):
            return self._text(content, "prompt", "empty_prompt")
        if not isinstance(value, list):
            raise RowProblem("wrong_type", self._name("prompt"), f"{value!r:.80}, and not text or messages")
        return read_messages(value, self._name("prompt"), self._image_mark)

    def _answer(self, content: dict[str, Any], answer: Any, field: str) -> Text | Chat:
        """A response to the prompt, which has a column of its own. field: names the response in messages."""
        prompt = self._prompt(content)
        if isinstance(answer, str):
            if not answer.strip():
                raise RowProblem("empty_answer", field, repr(answer)[:80])
            if isinstance(prompt, str) and not self.as_chat:
                return Text(prompt, answer)
            answers: list[Message] = [{"role": "assistant", "content": answer}]
        elif isinstance(answer, list | dict):
            answers = read_messages([answer] if isinstance(answer, dict) else answer, field, self._image_mark)
        else:
            raise RowProblem("wrong_type", field, f"{answer!r:.80}, and not text or messages")
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        check_order(prompt, self._name("prompt"))
        check_answers(answers, field)
        messages = [*prompt, *answers]
        check_order(messages, f"{self._name('prompt')}+{field}")
        return Chat(messages, len(prompt), self._tools(content))

    def _pair(self, content: dict[str, Any]) -> tuple[tuple[Text | Chat, ...], tuple[float, ...]]:
        fields = [self._name("chosen"), self._name("rejected")]
        values = [self._value(content, "chosen"), self._value(content, "rejected")]
        for field, value in zip(fields, values, strict=True):
            if not isinstance(value, str | list):
                raise RowProblem("wrong_type", field, f"{value!r:.80}, and not text or messages")
        if type(values[0]) is not type(values[1]):
            raise RowProblem("wrong_type", fields[1], "text and messages: both responses must have one form")
        if "prompt" not in self.columns.names or self._holds_prompts(content, values):
            answers = (
                self._whole_chats(content, values, fields)
                if isinstance(values[0], list)
                else _whole_texts(values, fields)
            )
        else:
            answers = [self._answer(content, value, field) for value, field in zip(values, fields, strict=True)]
        if answers[0] == answers[1]:
            raise RowProblem("same_answers", " and ".join(fields), "the same")
        margin = self._number(content, "margin") if "margin" in self.columns.names else 0.0
        if margin < 0:
            raise RowProblem("negative_margin", self._name("margin"), str(margin))
        return tuple(answers), (margin,)

    def _holds_prompts(self, content: dict[str, Any], values: Sequence[Any]) -> bool:
        """Whether both responses are whole conversations that begin with the prompt, and a column repeats the
        prompt."""
        if not all(isinstance(value, list) and _role(value) not in (None, "assistant") for value in values):
            return False
        prompt = self._prompt(content)
        for use, value in zip(("chosen", "rejected"), values, strict=True):
            messages = read_messages(value, self._name(use), self._image_mark)
            if isinstance(prompt, str):
                has_prompt = any(prompt in message["content"] for message in messages if message["role"] == "user")
            else:
                has_prompt = messages[: len(prompt)] == prompt
            if not has_prompt:
                found = f"a conversation without the text of the column {self._name('prompt')!r}"
                raise RowProblem("no_shared_prompt", self._name(use), found)
        return True

    def _whole_chats(self, content: dict[str, Any], values: Sequence[Any], fields: Sequence[str]) -> list[Text | Chat]:
        chats = [read_messages(value, field, self._image_mark) for value, field in zip(values, fields, strict=True)]
        for messages, field in zip(chats, fields, strict=True):
            check_order(messages, field)
        if chats[0] == chats[1]:
            raise RowProblem("same_answers", " and ".join(fields), "the same")
        shared = 0
        while shared < min(map(len, chats)) and chats[0][shared] == chats[1][shared]:
            shared += 1
        for messages, field in zip(chats, fields, strict=True):
            if not shared or any(message["role"] not in ("assistant", "tool") for message in messages[shared:]):
                raise RowProblem("no_shared_prompt", field, f"the first {shared} messages are shared")
            check_answers(messages, field, shared)
        return [Chat(messages, shared, self._tools(content)) for messages in chats]

    def _ranking(self, content: dict[str, Any]) -> tuple[tuple[Text | Chat, ...], tuple[float, ...]]:
        name = self._name("answers")
        values = self._value(content, "answers")
        if not isinstance(values, list):
            raise RowProblem("wrong_type", name, f"{values!r:.80}, and not a list of responses")
        if len(values) < 2:
            raise RowProblem("too_few_answers", name, f"{len(values)} answers")
        order = list(range(len(values)))
        for use, sign in (("ranks", 1), ("scores", -1)):
            if use in self.columns.names:
                numbers = self._numbers(content, use, len(values))
                if len(set(numbers)) < len(numbers):
                    raise RowProblem("tie", self._name(use), str(numbers)[:80])
                order = [place for _, place in sorted((sign * number, place) for place, number in enumerate(numbers))]
        answers = [self._answer(content, values[place], f"{name}[{place}]") for place in order]
        for place, answer in enumerate(answers):
            if answer in answers[:place]:
                raise RowProblem("same_answers", name, f"response {order[place]} occurs twice")
        return tuple(answers), self._margins(content, order)

    def _margins(self, content: dict[str, Any], order: Sequence[int]) -> tuple[float, ...]:
        if "margin" not in self.columns.names:
            return (0.0,) * (len(order) - 1)
        numbers = self._numbers(content, "margin", len(order), len(order) - 1)
        if len(numbers) == len(order):
            numbers = [numbers[a] - numbers[b] for a, b in zip(order, order[1:], strict=False)]
        if min(numbers) < 0:
            raise RowProblem("negative_margin", self._name("margin"), str(min(numbers)))
        return tuple(numbers)

    def _numbers(self, content: dict[str, Any], use: str, *lengths: int) -> list[float]:
        value = self._value(content, use)
        if not isinstance(value, list):
            raise RowProblem("wrong_type", self._name(use), f"{value!r:.80}, and not a list of numbers")
        if len(value) not in lengths:
            wanted = " or ".join(map(str, lengths))
            raise RowProblem("unequal_counts", self._name(use), f"{len(value)} numbers and not {wanted}")
        return [_finite(number, f"{self._name(use)}[{place}]") for place, number in enumerate(value)]

    def _number(self, content: dict[str, Any], use: str) -> float:
        return _finite(self._value(content, use), self._name(use))

    def _label(self, content: dict[str, Any]) -> bool:
        value = self._value(content, "label")
        if isinstance(value, str) or value not in (0, 1):
            raise RowProblem("not_a_label", self._name("label"), f"{value!r:.80}")
        return bool(value)


def _whole_texts(values: Sequence[str], fields: Sequence[str]) -> list[Text | Chat]:
    """Two texts, cut into prompt and response at the beginning of the word in which they differ first."""
    chosen, rejected = values
    for field, value in zip(fields, values, strict=True):
        if not value.strip():
            raise RowProblem("empty_answer", field, repr(value)[:80])
    if chosen == rejected:
        raise RowProblem("same_answers", " and ".join(fields), "the same")
    shared = next((n for n, (a, b) in enumerate(zip(*values, strict=False)) if a != b), min(map(len, values)))
    while shared and not chosen[shared - 1].isspace():
        shared -= 1
    # Tokenizers join a blank to the word after it.
    while shared and chosen[shared - 1] == " ":
        shared -= 1
    for field, value in zip(fields, values, strict=True):
        if not shared or not value[shared:].strip():
            raise RowProblem("no_shared_prompt", field, f"the first {shared} characters are shared")
    return [Text(value[:shared], value[shared:]) for value in values]


def _role(messages: list[Any]) -> Any:
    return messages[0].get("role") if messages and isinstance(messages[0], dict) else None


def _finite(value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RowProblem("not_a_number", field, f"{value!r:.80}")
    return float(value)
