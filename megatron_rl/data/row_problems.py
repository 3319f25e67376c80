"""The kinds of bad rows: for each kind the rule that is broken and what to do. An error names file, row and field."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_rl.errors import ConfigError
from megatron_rl.observe.appended_file import replace_file

SHOWN = 10
"""Bad rows that an error message lists, or the first of every kind where those are more; the others are counted."""

KINDS: dict[str, tuple[str, str]] = {
    "not_json": ("a line must be JSON", "correct the line, or write the file again"),
    "not_an_object": ("a line must be an object in braces", "write {column: value, ...}"),
    "not_utf8": ("text must be UTF-8", "convert the file, for instance with iconv -f latin1 -t utf-8"),
    "half_surrogate": ("text must not hold half of a surrogate pair, which is no valid Unicode", "take it out"),
    "repeated_field": ("an object must name each field once", "keep one of the two"),
    "missing": ("the field must be present and not null", "fill it in, or take the row out"),
    "wrong_type": ("the field must have the right type", "write a value of that type"),
    "empty_prompt": ("a prompt must not be empty", "fill it in, or take the row out"),
    "empty_answer": ("a response must not be empty", "fill it in, or take the row out"),
    "no_messages": ("a list of messages must not be empty", "fill it in, or take the row out"),
    "not_a_message": ("a message must be an object with role and content", "write {role: ..., content: ...}"),
    "unknown_role": (
        "a message's role must be system, developer, user, assistant or tool",
        "rename it: human is user, gpt and bot are assistant",
    ),
    "content_not_text": ("a message's content must be text, or parts of type text", "take images and sounds out"),
    "not_an_image": (
        "an image must be a path, or an object with its bytes or its path",
        "write {bytes: ..., path: ...} with one of the two",
    ),
    "image_count": (
        "every image must have one <image> in the text, or one part of type image, in their order",
        "write as many of them as the row has images",
    ),
    "unreadable_image": (
        "an image must be a whole png, jpeg or webp of one frame, grey or RGB, 8-bit",
        "save it again as such, or take the row out",
    ),
    "image_size": (
        "an image must have at least 2 pixels on each side, at most 64 million in all, and sides within 1 : 200",
        "scale or cut it, or take the row out",
    ),
    "image_outside": (
        "the path of an image must be below data.image_folder, with all links resolved",
        "move the file, set data.image_folder, or store the bytes in the row",
    ),
    "too_many_images": (
        "a prompt must have at most actor_rollout_ref.rollout.limit_images images",
        "raise it, or take the row out",
    ),
    "image_token": (
        "text must not have the tokens that stand for images and videos: they come from images alone",
        "take them out, or write <image> for an image of the row",
    ),
    "image_in_answer": (
        "a response must be text: <image> and parts of type image stand for images of the prompt",
        "take it out of the response, or take the row out",
    ),
    "not_a_chat": (
        "a prompt with images must be messages, which the chat_template renders",
        "write messages, or set data.prompt_as_chat=true",
    ),
    "not_text": (
        "a row must be text, and images where data.image_key names their column",
        "set data.image_key for a model that reads images, or take images, videos and sounds out",
    ),
    "misplaced_system": ("a system message must come before all others", "move it to the beginning"),
    "stray_tool_message": (
        "a tool's message must follow the assistant's or another tool's",
        "put the assistant's call before it",
    ),
    "no_question": ("something must come before the assistant's first turn", "put the question before the response"),
    "unanswered": ("the last message must be the assistant's", "remove the messages after its last turn"),
    "no_shared_prompt": (
        "chosen and rejected must begin with the same prompt and end with the assistant's responses",
        "write the prompt into both, or into a column of its own",
    ),
    "same_answers": ("the responses of a row must differ from each other", "take the row out"),
    "too_few_answers": ("a ranking needs at least 2 responses", "take the row out"),
    "unequal_counts": ("there must be one rank or score for each response", "write one for each response"),
    "tie": ("no two responses may have the same rank or score", "break the tie, or take one of the two out"),
    "not_a_label": ("a label must be true or false", "write true or false, or 1 or 0"),
    "not_a_number": ("the field must be a finite number", "write a number, or take the row out"),
    "negative_margin": ("a margin must be at least 0", "exchange chosen and rejected, or write 0"),
    "template_refuses": ("the tokenizer's chat_template must take the messages", "read its message above"),
    "template_rewrites": (
        "the chat_template must render a prompt as the beginning of prompt and response",
        "use a template that does, or one with {% generation %} marks",
    ),
    "unknown_token": (
        "every token must be one that the model has",
        "take the tokenizer's added tokens out of the row, or use a model that has them",
    ),
    "too_long": (
        "a row must have at most data.max_length tokens",
        "raise data.max_length, or set data.truncation to left, right or drop",
    ),
    "nothing_counted": (
        "a row must keep a token that counts in the loss",
        "raise data.max_length, or set data.truncation=left",
    ),
}
"""Kind -> (rule, what to do)."""


class RowPlace(NamedTuple):
    """The place of a row. row: from 0; rows of JSON lines are the lines that are not blank. line: from 1; None in
    parquet.
    """

    file: str
    row: int
    line: int | None = None

    def __str__(self) -> str:
        """The beginning of an error message."""
        return f"{self.file}: " + (f"row {self.row}" if self.line is None else f"line {self.line}")


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used. field: such as messages[2].role; empty for the whole row. found: the field's content,
    in words.
    """

    kind: str
    place: RowPlace
    field: str
    found: str

    def __str__(self) -> str:
        """Place, field, content, the rule and what to do."""
        rule, remedy = KINDS[self.kind]
        field = f", field {self.field!r}" if self.field else ""
        return f"{self.place}{field}: {self.found}; {rule}: {remedy} [{self.kind}]"

    def as_json(self) -> dict[str, object]:
        """The line of `bad_rows_file`."""
        rule, remedy = KINDS[self.kind]
        place = {"file": self.place.file, "row": self.place.row, "line": self.place.line}
        return place | {"field": self.field, "kind": self.kind, "found": self.found, "rule": rule, "remedy": remedy}


class RowProblem(Exception):
    """The current row cannot be used. The caller, which knows its place, makes a `BadRow` of it."""

    def __init__(self, kind: str, field: str, found: str) -> None:
        super().__init__(kind, field, found)
        self.kind, self.field, self.found = kind, field, found

    def __str__(self) -> str:
        """Kind, field and content."""
        return f"{self.kind}: {self.field}: {self.found}"

    def at(self, place: RowPlace) -> BadRow:
        """The bad row at `place`."""
        return BadRow(self.kind, place, self.field, self.found)


def refuse(bad_rows: Sequence[BadRow], num_rows: int, can_be_skipped: bool = True) -> None:
    """Raise ConfigError if there is a bad row. The message counts bad rows by kind, and lists the first of each kind
    and, up to `SHOWN`, the first of the others.

    num_rows: bad and good ones. can_be_skipped: whether the key `data.bad_rows` is for these files.
    """
    if not bad_rows:
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(row.kind for row in bad_rows).most_common())
    first = {row.kind: number for number, row in reversed(list(enumerate(bad_rows)))}
    others = [number for number in range(len(bad_rows)) if first[bad_rows[number].kind] != number]
    shown = sorted([*first.values(), *others[: max(0, SHOWN - len(first))]])
    lines = [f"  {bad_rows[number]}" for number in shown]
    if len(bad_rows) > len(shown):
        lines.append(f"  and {len(bad_rows) - len(shown)} more")
    headline = f"{len(bad_rows)} of {num_rows} rows cannot be used ({kinds})"
    remedy = "correct them"
    if can_be_skipped and len(bad_rows) < num_rows:
        remedy += ", or set data.bad_rows=skip to leave them out and have all of them listed"
    raise ConfigError("\n".join([f"{headline}: {remedy}", *lines]))


def write_bad_rows(path: str, bad_rows: Sequence[BadRow]) -> None:
    """Write JSON lines, one per bad row; an empty file if there is none. Raises ConfigError if it cannot be written."""
    file = Path(path).expanduser()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, "".join(json.dumps(row.as_json()) + "\n" for row in bad_rows).encode())
    except OSError as error:
        raise ConfigError(f"data.bad_rows_file={path} cannot be written: {error.strerror}") from error
