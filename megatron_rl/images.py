"""Images in rows: runs of placeholder tokens, each with the image that it stands for. Pure; no torch.

A run of placeholders says nothing of its image: two rows with the same tokens may show two images. So whatever compares
tokens, such as the keys of a trie or of a prefix cache, has to compare the pieces of the rows, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

DIGEST_SIZE = 16
"""Bytes of an image's digest."""

NUMBERS_OF_PIECE = 7
"""Integers of a piece in `numbers_of_pieces`."""

MOST_PIXELS = 64_000_000
"""Most pixels of an image that is read."""

Grid = tuple[int, int, int]
"""Patches of an image before merging: frames, rows and columns."""


class ImagePiece(NamedTuple):
    """A run of placeholder tokens of a row that stands for an image.

    first: the place of its first placeholder in the row. digest: 32 hex digits, of the image's patches and grid.
    num_tokens: its placeholders, `num_placeholders` of its grid.
    """

    first: int
    digest: str
    grid: Grid
    num_tokens: int

    @property
    def stop(self) -> int:
        """The place behind its last placeholder."""
        return self.first + self.num_tokens

    @property
    def num_patches(self) -> int:
        """Patches of the image, before merging."""
        return prod(self.grid)

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """Its first place, its placeholders, and the two halves of its digest as signed integers of 64 bits."""
        halves = bytes.fromhex(self.digest)
        middle = DIGEST_SIZE // 2
        low, high = (int.from_bytes(half, "little", signed=True) for half in (halves[:middle], halves[middle:]))
        return self.first, self.num_tokens, low, high


Pieces = tuple[ImagePiece, ...]
"""The images of a row, in the order of their placeholders."""


def digest_of_image(patches: bytes | memoryview, grid: Grid) -> str:
    """Return the digest of an image by the bytes of its patches and by its grid."""
    digest = hashlib.blake2b(patches, digest_size=DIGEST_SIZE)
    digest.update(repr(tuple(grid)).encode())
    return digest.hexdigest()


def key_of(content: bytes) -> str:
    """Return the key of an encoded image, by which messages name it."""
    return f"image-{hashlib.blake2b(content, digest_size=DIGEST_SIZE).hexdigest()}"


def digest_of_numbers(low: int, high: int) -> str:
    """Return a digest by its two halves in `ImagePiece.numbers`."""
    return b"".join(half.to_bytes(DIGEST_SIZE // 2, "little", signed=True) for half in (low, high)).hex()


def num_placeholders(grid: Grid, merge: int) -> int:
    """Return how many tokens stand for an image, of which merge x merge patches make one.

    Raises ValueError for a grid of which they do not.
    """
    frames, rows, columns = grid
    if min(grid) < 1 or rows % merge or columns % merge:
        raise ValueError(f"a grid of {frames} x {rows} x {columns} patches cannot be merged {merge} x {merge}")
    return prod(grid) // merge**2


def pieces_of_tokens(
    token_ids: Sequence[int], placeholder: int, images: Sequence[tuple[str, Grid]], merge: int
) -> tuple[list[int], Pieces]:
    """Write out the placeholders of a row, of which `token_ids` has one for each image.

    images: digest and grid of each. Returns the row's tokens and its pieces. Raises ValueError where the row does not
    have as many placeholders as images.
    """
    places = [place for place, token in enumerate(token_ids) if token == placeholder]
    if len(places) != len(images):
        raise ValueError(f"{len(places)} placeholders for {len(images)} images")
    whole, pieces, before = list[int](), list[ImagePiece](), 0
    for place, (digest, grid) in zip(places, images, strict=True):
        whole += token_ids[before:place]
        piece = ImagePiece(len(whole), digest, grid, num_placeholders(grid, merge))
        pieces.append(piece)
        whole += [placeholder] * piece.num_tokens
        before = place + 1
    return [*whole, *token_ids[before:]], tuple(pieces)


def check_pieces(pieces: Sequence[ImagePiece], num_tokens: int) -> None:
    """Raise ValueError unless the pieces are parts of a row of `num_tokens`, one after the other."""
    for piece in pieces:
        if piece.first < 0 or piece.num_tokens < 1 or piece.stop > num_tokens:
            raise ValueError(f"an image has the tokens {piece.first} to {piece.stop} of a row of {num_tokens}")
    for one, other in pairwise(pieces):
        if other.first < one.stop:
            raise ValueError(f"an image ends at token {one.stop}, and the next begins at token {other.first}")


def pieces_between(pieces: Sequence[ImagePiece], start: int, stop: int) -> Pieces:
    """Return the pieces of the tokens from `start` to `stop` of a row, with their places there.

    Raises ValueError where an image would lose a part of its tokens.
    """
    kept = []
    for piece in pieces:
        if piece.stop <= start or piece.first >= stop:
            continue
        if piece.first < start or piece.stop > stop:
            raise ValueError(f"a cut from token {start} to {stop} parts an image, tokens {piece.first} to {piece.stop}")
        kept.append(piece._replace(first=piece.first - start))
    return tuple(kept)


def moved(pieces: Sequence[ImagePiece], places: int) -> Pieces:
    """Return pieces that many places later in their row."""
    return tuple(piece._replace(first=piece.first + places) for piece in pieces)


def numbers_of_pieces(pieces: Sequence[ImagePiece]) -> tuple[int, ...]:
    """Return seven integers for each piece, `ImagePiece.numbers` and its grid, end to end."""
    return tuple(number for piece in pieces for number in (*piece.numbers, *piece.grid))


def pieces_of_numbers(numbers: Sequence[int]) -> Pieces:
    """Return the pieces of `numbers_of_pieces`. Raises ValueError for other numbers."""
    if len(numbers) % NUMBERS_OF_PIECE:
        raise ValueError(f"{len(numbers)} numbers are not {NUMBERS_OF_PIECE} for each image")
    rows = (numbers[first : first + NUMBERS_OF_PIECE] for first in range(0, len(numbers), NUMBERS_OF_PIECE))
    return tuple(
        ImagePiece(first, digest_of_numbers(low, high), (frames, lines, columns), num_tokens)
        for first, num_tokens, low, high, frames, lines, columns in rows
    )


def parts_an_image(pieces: Sequence[ImagePiece], place: int) -> bool:
    """Return whether a cut before the token at `place` parts an image."""
    return any(piece.first < place < piece.stop for piece in pieces)
