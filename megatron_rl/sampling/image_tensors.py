"""The images that turns of unfinished episodes show, as tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import torch

from megatron_rl.agents.episode import Episode
from megatron_rl.images import ImagePiece, Pieces, numbers_of_pieces, pieces_of_numbers


class TurnImages(Protocol):
    """Encoded images of turns."""

    def encoded(self, digest: str) -> bytes | None:
        """Return an encoded image by its digest; None: no turn has shown it."""

    def add(self, contents: Iterable[bytes]) -> None:
        """Keep the encoded images of a checkpoint."""

    def record(self, pieces: Sequence[ImagePiece]) -> None:
        """Keep images of a recorded schedule for the schedule that repeats it."""

    def forget(self, needed: Collection[str]) -> None:
        """Drop some images; those with digests in `needed` are kept."""


def images_as_tensors(episodes: Mapping[int, Episode], images: TurnImages) -> dict[str, torch.Tensor]:
    """Return the images that turns of episodes have shown, for a checkpoint; {} without any.

    turn_images: int64 [N, 8], of each of a row the request and `numbers_of_pieces`. encoded_images: uint8, those of
    turns end to end, each once, of encoded_sizes int64 bytes.
    """
    rows = {number: episode for number, episode in episodes.items() if episode.images}
    digests = {piece.digest for episode in rows.values() for piece in episode.images or ()}
    contents = [content for digest in sorted(digests) if (content := images.encoded(digest)) is not None]
    if not rows:
        return {}
    numbers = [(number, *numbers_of_pieces([piece])) for number, e in rows.items() for piece in e.images or ()]
    return {
        "turn_images": torch.tensor(numbers, dtype=torch.int64),
        "encoded_images": torch.frombuffer(bytearray(b"".join(contents) or b"\0"), dtype=torch.uint8),
        "encoded_sizes": torch.tensor([len(content) for content in contents], dtype=torch.int64),
    }


def encoded_of_tensors(tensors: Mapping[str, torch.Tensor]) -> list[bytes]:
    """Return the encoded images of `images_as_tensors`."""
    if "encoded_images" not in tensors:
        return []
    content, sizes = tensors["encoded_images"].numpy().tobytes(), tensors["encoded_sizes"].tolist()
    ends = list(accumulate(sizes))
    return [content[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def pieces_of_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[int, Pieces]:
    """Return the images of each request of `images_as_tensors`. Raises ValueError for other numbers."""
    shown: dict[int, Pieces] = {}
    for request, *numbers in tensors.get("turn_images", torch.zeros(0, 1, dtype=torch.int64)).tolist():
        shown[request] = (*shown.get(request, ()), *pieces_of_numbers(numbers))
    return shown
