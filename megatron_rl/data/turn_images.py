"""The images that turns show: encoded images on the disk, each once, and their places among the tokens of turns.

Keys are those of messages (`images.key_of`), digests those of rows (`images.ImagePiece`). A run that writes a
schedule keeps the images in a folder next to it, by digest, from which the schedule is repeated.
"""

from __future__ import annotations

import base64
import binascii
import tempfile
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from megatron_rl.data.image_processor import ImageReader, ReadImage
from megatron_rl.data.image_sources import ImageSource
from megatron_rl.images import Grid, ImagePiece, Pieces, key_of
from megatron_rl.observe.appended_file import replace_file

FOLDER = "schedule_images"
"""Next to a schedule: one file for each image that its turns show."""
MOST_BYTES = 4 << 30
"""Bytes of encoded images beyond which those that no open episode shows are dropped."""


class ImagesOfTurns:
    """Images by key and by digest. reader: makes patches of them."""

    def __init__(self, reader: ImageReader, most_bytes: int = MOST_BYTES) -> None:
        self._reader, self._most_bytes = reader, most_bytes
        self._folder = tempfile.TemporaryDirectory(prefix="megatron_rl_images_")
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._read: dict[str, ReadImage] = {}
        self._key_of_digest: dict[str, str] = {}
        self._written: Path | None = None
        self._recorded: Path | None = None

    def record_in(self, written: Path | None, recorded: Path | None) -> None:
        """Keep images for a replay in the folder `written`; those of a recorded schedule are in `recorded`."""
        self._written, self._recorded = written, recorded

    def keep(self, images: Mapping[str, str]) -> None:
        """Keep images in base64 by their keys. Raises ValueError for a key that is not the image's."""
        for key, coded in images.items():
            if key in self._sizes:
                self._sizes.move_to_end(key)
                continue
            try:
                content = base64.b64decode(coded, validate=True)
            except binascii.Error as error:
                raise ValueError(f"an image is no base64: {error}") from None
            if key_of(content) != key:
                raise ValueError(f"{key} is not the key of its image")
            self._keep(key, content)

    def _keep(self, key: str, content: bytes) -> None:
        (Path(self._folder.name) / key).write_bytes(content)
        self._sizes[key] = len(content)

    def known(self, key: str) -> tuple[str, Grid]:
        """Return digest and grid of an image. Raises ValueError for one that is not kept or cannot be read."""
        if key not in self._read:
            if key not in self._sizes:
                raise ValueError(f"no environment has shown {key}")
            content = self._content(key)
            (read,) = self._reader.read([ImageSource(content)])
            if not isinstance(read, ReadImage):
                raise ValueError(f"an image cannot be used ({read.kind}): {read.reason}")
            self._read[key] = read
            self._key_of_digest.setdefault(read.digest, key)
            self._record(read.digest, content)
        read = self._read[key]
        return read.digest, read.grid

    def _content(self, key: str) -> bytes:
        return (Path(self._folder.name) / key).read_bytes()

    def encoded(self, digest: str) -> bytes | None:
        """Return an encoded image by its digest; None: no turn has shown it."""
        key = self._key_of_digest.get(digest)
        if key is not None:
            return self._content(key)
        folders = (folder for folder in (self._written, self._recorded) if folder is not None)
        return next(((folder / digest).read_bytes() for folder in folders if (folder / digest).is_file()), None)

    def add(self, contents: Iterable[bytes]) -> None:
        """Keep the encoded images of a checkpoint. Raises ValueError for one that cannot be read."""
        for content in contents:
            key = key_of(content)
            if key not in self._sizes:
                self._keep(key, content)
            self.known(key)

    def record(self, pieces: Sequence[ImagePiece]) -> None:
        """Keep images of a recorded schedule for the schedule that repeats it."""
        for digest in {piece.digest for piece in pieces}:
            if (content := self.encoded(digest)) is not None:
                self._record(digest, content)

    def _record(self, digest: str, content: bytes) -> None:
        if self._written is not None and not (self._written / digest).exists():
            self._written.mkdir(parents=True, exist_ok=True)
            replace_file(self._written / digest, content)

    def forget(self, needed: Collection[str]) -> None:
        """Drop images, the oldest first, while they have too many bytes; those with digests in `needed` are kept."""
        size = sum(self._sizes.values())
        for key in list(self._sizes):
            if size <= self._most_bytes:
                break
            read = self._read.get(key)
            if read is not None and read.digest in needed:
                continue
            size -= self._sizes.pop(key)
            (Path(self._folder.name) / key).unlink()
            if read is not None:
                del self._read[key]
                if self._key_of_digest.get(read.digest) == key:
                    del self._key_of_digest[read.digest]


def shown_images(keys: Sequence[str | None], prompt: Pieces, images: ImagesOfTurns) -> list[tuple[str, Grid]]:
    """Return digest and grid of images of messages. keys: theirs; None: the next one of the dataset's prompt.

    Raises ValueError for other images than a prompt has, and as `ImagesOfTurns.known`.
    """
    own = [piece[1:3] for piece in prompt]
    if 0 < keys.count(None) != len(own):
        raise ValueError("images of the prompt were cut (data.max_prompt_length)")
    rest = iter(own)
    return [next(rest) if key is None else images.known(key) for key in keys]
