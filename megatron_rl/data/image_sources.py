"""The images of a prompt as its file has them, and the parts of its messages that stand for them. Pure.

A row is as in verl: a column with images, each bytes or a path, and messages in whose text `<image>` stands for one, or
whose content is a list of parts of which some are of type image. The n-th of these is the n-th image of the column.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_rl.data.message_form import Message
from megatron_rl.data.row_problems import RowProblem

MARK = "<image>"
"""What stands for an image in the text of a message."""
AROUND_MARKS = re.compile(f"({re.escape(MARK)})")
IMAGE_PART: dict[str, str] = {"type": "image"}


class ImageSource(NamedTuple):
    """An encoded image: its bytes, or else the path of its file as the row has it."""

    content: bytes | None
    path: str = ""


def sources_of(value: Any, field: str) -> list[ImageSource]:
    """Return the images of a row's column: a list of images, one alone, or none. Raises RowProblem."""
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    several = isinstance(value, list)
    return [_source(one, f"{field}[{number}]" if several else field) for number, one in enumerate(values)]


def _source(value: Any, field: str) -> ImageSource:
    if isinstance(value, str) and value:
        return ImageSource(None, value)
    if isinstance(value, bytes) and value:
        return ImageSource(value)
    if isinstance(value, Mapping):
        content, path = value.get("bytes"), value.get("path")
        if isinstance(content, bytes) and content:
            return ImageSource(content, path if isinstance(path, str) else "")
        if content is None and isinstance(path, str) and path:
            return ImageSource(None, path)
    shown = f"{{{', '.join(value)}}}" if isinstance(value, Mapping) else f"{value!r:.60}"
    raise RowProblem("not_an_image", field, shown)


def with_image_parts(messages: Sequence[Message], num_images: int, field: str) -> list[Message]:
    """Return the messages with a part of type image for each image. field: of the messages, for errors.

    Raises RowProblem where they do not have as many marks and parts as there are images, and for parts that are neither
    text nor images.
    """
    changed, num_parts = [], 0
    for number, message in enumerate(messages):
        content = message.get("content")
        place = f"{field}[{number}].content"
        if isinstance(content, str):
            parts = list(_text_parts(content)) if MARK in content else None
        elif isinstance(content, Sequence):
            parts = [part for each, given in enumerate(content) for part in _parts(given, f"{place}[{each}]")]
        else:
            raise RowProblem("content_not_text", place, f"{content!r:.60}")
        num_parts += 0 if parts is None else sum(part["type"] == "image" for part in parts)
        changed.append(message if parts is None else {**message, "content": parts})
    if num_parts != num_images:
        raise RowProblem("image_count", field, f"{num_parts} of {MARK} or image parts for {num_images} images")
    return changed


def num_images(messages: Sequence[Message]) -> int:
    """Return how many images the messages of `with_image_parts` show."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return sum(part["type"] == "image" for part in parts)


def _text_parts(text: str) -> Iterator[dict[str, Any]]:
    for piece in AROUND_MARKS.split(text):
        if piece == MARK:
            yield dict(IMAGE_PART)
        elif piece:
            yield {"type": "text", "text": piece}


def _parts(part: Any, field: str) -> Iterator[dict[str, Any]]:
    """The parts of a part: a text with marks is several."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        yield from _text_parts(part["text"])
    elif kind == "image":
        yield dict(IMAGE_PART)
    else:
        raise RowProblem("content_not_text", field, f"a part of type {kind}")
