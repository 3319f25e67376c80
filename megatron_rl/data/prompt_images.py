"""The images of a run's prompts: encoded bytes wait on the disk, patches are made when a step needs them.

Every image is read once as the files are opened, for its digest and grid, and to find bad rows. Its patches,
which are much larger, are made again for the steps that read them, so that this process never holds those of a data
set.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch

from megatron_rl.config.synonyms import suggested_column
from megatron_rl.data.image_processor import AT_ONCE, ImageForms, ImageReader, ReadImage, Unreadable, file_content
from megatron_rl.data.image_sources import ImageSource, sources_of, with_image_parts
from megatron_rl.data.patch_pictures import png_of_patches
from megatron_rl.data.row_problems import BadRow, RowPlace, RowProblem, refuse
from megatron_rl.data.turn_images import FOLDER, ImagesOfTurns, shown_images
from megatron_rl.errors import ConfigError
from megatron_rl.images import Grid, ImagePiece, Pieces, parts_an_image, pieces_between, pieces_of_tokens
from megatron_rl.records import Conversation

IMAGE_COLUMNS = ("images", "image")
"""Usual names of the column."""


class StoredImage(NamedTuple):
    """An encoded image: a range of the store's file, or the path of its own where size is 0."""

    path: str
    first: int = 0
    size: int = 0


class ImageStore:
    """Encoded images in a file without a name, each once."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115, it is open as long as the run
        self._known: dict[bytes, StoredImage] = {}
        self._size = 0

    def keep(self, source: ImageSource) -> StoredImage:
        """Store the bytes of an image, or its path."""
        if source.content is None:
            return StoredImage(source.path)
        key = hashlib.blake2b(source.content, digest_size=16).digest()
        if key not in self._known:
            self._file.seek(self._size)
            self._file.write(source.content)
            self._file.flush()
            self._known[key] = StoredImage("", self._size, len(source.content))
            self._size += len(source.content)
        return self._known[key]

    def source(self, stored: StoredImage) -> ImageSource:
        """Return an image as it was given."""
        if not stored.size:
            return ImageSource(None, stored.path)
        return ImageSource(os.pread(self._file.fileno(), stored.size, stored.first))


@dataclass(frozen=True)
class PlaceholderIds:
    """placeholder: the token that stands for a part of an image. unsampled: that one, and others that text may not
    have.
    """

    placeholder: int
    unsampled: tuple[int, ...]


class PromptImages:
    """Reads the images of prompts, and those that turns show. column: `data.image_key`. most: images of a prompt, at
    most; None: any number. is_optional: files may be without the column, which are in `files_without` then.
    """

    def __init__(
        self, column: str, forms: ImageForms, tokens: PlaceholderIds, most: int | None, is_optional: bool = False
    ) -> None:
        self.is_optional, self.files_without = is_optional, list[str]()
        self.column, self._forms, self._tokens, self._most = column, forms, tokens, most
        self._reader, self._store = ImageReader(forms), ImageStore()
        self._read: dict[StoredImage, ReadImage | Unreadable] = {}
        self._of_digest: dict[str, StoredImage] = {}
        self.turns = ImagesOfTurns(self._reader)

    def of_row(self, prompt: Conversation, field: str, value: object) -> tuple[Conversation, tuple[StoredImage, ...]]:
        """Return a prompt with parts for its images, and these. field: the prompt's. value: the column's.

        Raises RowProblem for what is no image, too many or too few, and images of a prompt that is text.
        """
        images = self.stored(value)
        if isinstance(prompt, str):
            if images:
                raise RowProblem("not_a_chat", field, f"text with {len(images)} images")
            return prompt, ()
        return with_image_parts(prompt, len(images), field), images

    def check_column(self, path: str, forms: Mapping[str, str]) -> None:
        """Raise ConfigError for a file of examples without the column. forms: column -> form."""
        if self.column not in forms:
            like = suggested_column(self.column, IMAGE_COLUMNS, list(forms))
            hint = "" if like is None else f"; did you mean: {like}"
            raise ConfigError(
                f"{path} has no column {self.column!r} (data.image_key): its columns are {', '.join(forms)}{hint}"
            )

    def stored(self, value: object) -> tuple[StoredImage, ...]:
        """Return the images of a row. value: the column's. Raises RowProblem for what is no image, and for too many."""
        sources = sources_of(value, self.column)
        if self._most is not None and len(sources) > self._most:
            raise RowProblem("too_many_images", self.column, f"{len(sources)} images, at most {self._most}")
        return tuple(map(self._store.keep, sources))

    def problems(self, rows: Sequence[tuple[RowPlace, Sequence[StoredImage]]]) -> list[BadRow]:
        """Read the images of rows, each once; return a bad row for the first of a row that cannot be used."""
        new = [image for image in dict.fromkeys(chain(*(images for _, images in rows))) if image not in self._read]
        for some in (new[first : first + AT_ONCE] for first in range(0, len(new), AT_ONCE)):
            for image, read in zip(some, self._reader.read([*map(self._store.source, some)]), strict=True):
                self._read[image] = read
                if isinstance(read, ReadImage):
                    self._of_digest.setdefault(read.digest, image)
        bad_rows = []
        for place, images in rows:
            reads = [(number, self._read[image]) for number, image in enumerate(images)]
            wrong = next(((number, read) for number, read in reads if isinstance(read, Unreadable)), None)
            if wrong is not None:
                number, read = wrong
                bad_rows.append(BadRow(read.kind, place, f"{self.column}[{number}]", read.reason))
        return bad_rows

    def all_written_out(
        self,
        places: Sequence[RowPlace],
        token_ids: Sequence[Sequence[int]],
        images: Sequence[Sequence[StoredImage]],
        field: str,
    ) -> tuple[list[list[int]], list[Pieces]]:
        """Return the tokens of prompts with all placeholders of their images, and the pieces of these.

        token_ids: with one placeholder for each image. field: the prompts'. Raises ConfigError where a text has
        tokens of its own that stand for images or videos.
        """
        whole, bad_rows = list[tuple[list[int], Pieces]](), list[BadRow]()
        for place, ids, own in zip(places, token_ids, images, strict=True):
            try:
                whole.append(self.written_out(ids, own))
            except RowProblem as problem:
                bad_rows.append(BadRow(problem.kind, place, field, problem.found))
        refuse(bad_rows, len(places), can_be_skipped=False)
        return [ids for ids, _ in whole], [pieces for _, pieces in whole]

    def written_out(self, token_ids: Sequence[int], images: Sequence[StoredImage]) -> tuple[list[int], Pieces]:
        """Return the tokens of one text with all placeholders of its images, which can be read, and their pieces.

        Raises RowProblem for other tokens that stand for images or videos.
        """
        shown = [read for read in map(self._read.__getitem__, images) if isinstance(read, ReadImage)]
        return self._with_placeholders(token_ids, [(read.digest, read.grid) for read in shown])

    def _with_placeholders(
        self, token_ids: Sequence[int], shown: Sequence[tuple[str, Grid]]
    ) -> tuple[list[int], Pieces]:
        marks = [token for token in token_ids if token in self._tokens.unsampled]
        if marks != [self._tokens.placeholder] * len(shown):
            raise RowProblem("image_token", "", f"{len(marks)} such tokens for {len(shown)} images")
        return pieces_of_tokens(token_ids, self._tokens.placeholder, shown, self._forms.merge)

    def keep(self, images: Mapping[str, str]) -> None:
        """Keep images of turns. Raises as `ImagesOfTurns.keep`."""
        self.turns.keep(images)

    def turn_written_out(
        self, token_ids: Sequence[int], keys: Sequence[str | None], prompt: Pieces
    ) -> tuple[list[int], Pieces]:
        """Return the tokens of messages with all placeholders of their images, and the pieces of these.

        token_ids: with one placeholder for each image. keys, prompt: as `shown_images`. Raises ValueError as that, and
        where a text has tokens of its own that stand for images or videos.
        """
        try:
            return self._with_placeholders(token_ids, shown_images(keys, prompt, self.turns))
        except RowProblem as problem:
            raise ValueError(f"a text has tokens that stand for images: {problem.found}") from None

    def encoded(self, pieces: Pieces) -> list[bytes]:
        """Return the encoded images of a prompt. Raises ConfigError for a file that has changed."""
        return [self._content(self._store.source(self._of_digest[piece.digest])) for piece in pieces]

    def _content(self, source: ImageSource) -> bytes:
        if source.content is not None:
            return source.content
        try:
            return file_content(source.path, self._forms.image_folder)
        except (OSError, RowProblem) as error:
            raise ConfigError(f"the image {source.path} has changed since the run began: {error}") from None

    def patches(self, digests: Sequence[str]) -> list[tuple[Grid, torch.Tensor]]:
        """Return the grid and the patches float32 [patches, values] of images, which are read again.

        Raises ConfigError for a file that has another image by now.
        """
        sources = [*map(self._source, digests)]
        made = []
        read_again = self._reader.read(sources, with_patches=True)
        for source, digest, read in zip(sources, digests, read_again, strict=True):
            if isinstance(read, Unreadable) or read.digest != digest or read.patches is None:
                now = read.reason if isinstance(read, Unreadable) else "it has another image"
                raise ConfigError(f"the image {source.path or digest} has changed since the run began: {now}")
            made.append((read.grid, torch.from_numpy(read.patches)))
        return made

    def png(self, digest: str) -> bytes:
        """Return an image as a model sees it, as PNG. Raises as `patches`."""
        [(grid, patches)] = self.patches([digest])
        return png_of_patches(patches.numpy(), grid, self._forms.settings)

    def _source(self, digest: str) -> ImageSource:
        """An image of a prompt or of a turn. Raises ConfigError for one that is kept no more."""
        if digest in self._of_digest:
            return self._store.source(self._of_digest[digest])
        content = self.turns.encoded(digest)
        if content is None:
            raise ConfigError(
                f"image {digest} of a turn is not kept: a recorded schedule needs the folder {FOLDER} next to it"
            )
        return ImageSource(content)

    def close(self) -> None:
        """End the process that reads images, until the next call."""
        self._reader.close()


def cut_whole(token_ids: Sequence[int], pieces: Pieces, head: int, tail: int) -> tuple[list[int], Pieces]:
    """Return the first `head` and the last `tail` tokens of a prompt, fewer where a cut would part an image: all of
    that image is left out.
    """
    stop, start = head, len(token_ids) - tail
    for piece in pieces:
        stop = piece.first if parts_an_image([piece], stop) else stop
        start = piece.stop if parts_an_image([piece], start) else start
    later = pieces_between(pieces, start, len(token_ids))
    kept = (*pieces_between(pieces, 0, stop), *(piece._replace(first=piece.first + stop) for piece in later))
    return [*token_ids[:stop], *token_ids[start:]], kept


def distinct(rows: Iterable[Pieces], known: Mapping[str, object]) -> Iterator[ImagePiece]:
    """Yield one piece of each image of rows that is not yet in `known`."""
    seen = set(known)
    for piece in (piece for pieces in rows for piece in pieces):
        if piece.digest not in seen:
            seen.add(piece.digest)
            yield piece
