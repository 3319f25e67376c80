"""Images in messages of turns, whatever their form: parts of content with a key, and the encoded images by these keys.

    data URL, base64, bytes, PIL, array --content_of--> {"type": "image", "image": KEY} and KEY -> encoded image

A key is a digest of the encoded image. So a conversation that is sent again with all its images has the same messages,
and each image is kept once. Nothing is read from a file or from the network. No torch.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_rl.images import MOST_PIXELS, key_of

Part = dict[str, Any]
Images = dict[str, bytes]
"""Key -> encoded image."""

KEY = re.compile("image-[0-9a-f]{32}")
MOST_BYTES = 64 << 20
"""Most bytes of the encoded images of an episode, together."""
MOST_NEW_BYTES = 11 << 20
"""Most bytes of those that a turn shows first, which are sent on in one message of 16 MiB, in base64."""
IMAGES = ("image", "image_url", "input_image")
"""Types of parts with an image, of all protocols."""
TEXTS = ("text", "input_text", "output_text")
"""Types of parts with a text, of all protocols."""
FORMATS = {"image/png": b"\x89PNG\r\n\x1a\n", "image/jpeg": b"\xff\xd8\xff", "image/webp": b"RIFF"}
"""Media types, and how files of each begin."""
ALIASES = {"image/jpg": "image/jpeg"}
URL_FORM = "data:image/png;base64,..., or the same with image/jpeg or image/webp"
WEBP_MARK = slice(8, 12)


def text_of(value: Any, name: str) -> str:
    """Return the text of a part, or raise ValueError. name: the field's."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text; it is {value!r:.80}")
    return value


def content_of(name: str, content: Any, images: Images | None) -> str | list[Part]:
    """Return the content of a message: one text, or, where it shows images, its parts.

    content: a text, nothing, or parts, of OpenAI's chat completions and responses, of Anthropic's messages, or with
    bytes, images of PIL or arrays. images: gets those that it shows; None: it can show none. name: the field's, for
    the ValueError that others raise.
    """
    if content is None or isinstance(content, str):
        return content or ""
    given = content if isinstance(content, Sequence) and not isinstance(content, bytes) else [content]
    parts = [_part(name, content, part, images) for part in given]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(name: str, content: Any, part: Any, images: Images | None) -> Part:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in TEXTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in IMAGES:
        raise ValueError(f"{name} must be text{'' if images is None else ' or images'}; it is {content!r:.80}")
    if images is None:
        rule = "images need data.image_key, and the policy's own messages have none"
        raise ValueError(f"{name} must be text; it has an image, and {rule}")
    value = part.get("source")
    value = part.get(kind if kind == "image" else "image_url") if value is None else value
    encoded = _encoded(name, value.get("url") if kind == "image_url" and isinstance(value, Mapping) else value)
    if isinstance(encoded, str):
        return {"type": "image", "image": encoded}
    key = key_of(encoded)
    images[key] = encoded
    return {"type": "image", "image": key}


def _encoded(name: str, value: Any) -> bytes | str:
    """Return an encoded image, or its key where it is given as such. Raises ValueError for what is neither."""
    if isinstance(value, str) and KEY.fullmatch(value):
        return value
    if isinstance(value, str):
        media_type, coded = _of_url(name, value)
        return checked(name, _decoded(name, coded), media_type)
    if isinstance(value, Mapping) and value.get("type") == "base64":
        coded = text_of(value.get("data"), f"{name}: the data of an image")
        return checked(name, _decoded(name, coded), str(value.get("media_type")))
    if isinstance(value, bytes | bytearray):
        return checked(name, bytes(value))
    if hasattr(value, "__array_interface__"):
        return _png(name, value)
    shown = value.get("type") if isinstance(value, Mapping) else type(value).__name__
    raise ValueError(f"{name}: an image must be {URL_FORM}, bytes, an image of PIL or an array; it is a {shown}")


def _of_url(name: str, url: str) -> tuple[str, str]:
    head, comma, coded = url.partition(",")
    scheme, _, form = head.lower().partition(":")
    media_type, *options = form.split(";")
    if scheme != "data":
        raise ValueError(f"{name}: an image must be {URL_FORM}; nothing is fetched, and this is {url!r:.60}")
    if not comma or options[-1:] != ["base64"]:
        raise ValueError(f"{name}: an image must be {URL_FORM}; it begins with {head!r:.60}")
    return media_type, coded


def _decoded(name: str, coded: str) -> bytes:
    try:
        return base64.b64decode(coded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{name}: an image is no base64: {error}") from None


def media_type_of(content: bytes) -> str | None:
    """Return the media type of an encoded image by its first bytes; None for other formats."""
    known = next((media_type for media_type, start in FORMATS.items() if content.startswith(start)), None)
    return None if known == "image/webp" and content[WEBP_MARK] != b"WEBP" else known


def checked(name: str, content: bytes, media_type: str | None = None) -> bytes:
    """Return an encoded image. media_type: as which it was sent. Raises ValueError for another one, and for formats
    that are not read.
    """
    sent = ALIASES.get(media_type or "", media_type)
    if sent is not None and sent not in FORMATS:
        raise ValueError(f"{name}: images of type {media_type} are not read; send {', '.join(FORMATS)}")
    known = media_type_of(content)
    if known is None or known != (sent or known):
        raise ValueError(
            f"{name}: an image of type {sent or 'bytes'} begins with {content[:8]!r}, as no such file does"
        )
    return content


def _png(name: str, value: Any) -> bytes:
    """Return an image of PIL, or an array of its pixels, as a file without loss."""
    from PIL import Image

    try:
        sides = value.size if isinstance(value, Image.Image) else value.__array_interface__["shape"][:2]
        if math.prod(sides) > MOST_PIXELS:
            raise ValueError(f"it has {' x '.join(map(str, sides))} pixels; at most {MOST_PIXELS:,}")
        image = value if isinstance(value, Image.Image) else Image.fromarray(value)
        image.save(content := io.BytesIO(), "PNG")
    except (TypeError, ValueError, OSError, KeyError, AttributeError) as error:
        raise ValueError(f"{name}: an image cannot be written as PNG: {error}") from None
    return content.getvalue()


def as_url(content: bytes) -> str:
    """Return an encoded image as a data URL."""
    return f"data:{media_type_of(content) or 'image/png'};base64,{base64.b64encode(content).decode()}"


def shows_images(value: Any) -> bool:
    """Return whether the result of a tool is an image of PIL, or a list of parts of which one is an image."""
    if isinstance(value, list):
        return any(isinstance(part, Mapping) and part.get("type") in IMAGES for part in value)
    kind = type(value)
    return any(base.__module__.startswith("PIL.") and base.__name__ == "Image" for base in kind.__mro__)


def is_content(value: Any) -> bool:
    """Return whether a value is what `content_of` returns."""
    return isinstance(value, str) or (isinstance(value, list) and bool(value) and all(map(_is_part, value)))


def _is_part(value: Any) -> bool:
    match value:
        case {"type": "text", "text": str()} if len(value) == 2:
            return True
        case {"type": "image", "image": str(key)} if len(value) == 2:
            return KEY.fullmatch(key) is not None
    return False


def images_of(messages: Iterable[Mapping[str, Any]]) -> list[str | None]:
    """Return the key of each image that messages show, in order; None for those of the dataset's prompt."""
    parts = (part for message in messages if isinstance(message["content"], list) for part in message["content"])
    return [part.get("image") for part in parts if part.get("type") == "image"]


class EpisodeImages:
    """The encoded images of an episode, each once, until they have been sent on."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes, self._size = most_bytes, 0
        self._known: set[str] = set()
        self._unsent: Images = {}

    def add(self, images: Images) -> None:
        """Keep images that are new. Raises ValueError for more bytes than an episode, or one of its turns, may have."""
        new = {key: content for key, content in images.items() if key not in self._known}
        size = self._size + sum(map(len, new.values()))
        unsent = sum(map(len, (*self._unsent.values(), *new.values())))
        for what, number, most in (("an episode", size, self._most_bytes), ("a turn", unsent, MOST_NEW_BYTES)):
            if number > most:
                raise ValueError(f"the new images of {what} have {number} bytes together; at most {most}")
        self._size = size
        self._known |= new.keys()
        self._unsent |= new

    def take(self) -> dict[str, str]:
        """Return those that were not yet taken, in base64."""
        unsent, self._unsent = self._unsent, {}
        return {key: base64.b64encode(content).decode() for key, content in unsent.items()}
