"""Features of the images that rows show: the tower reads each distinct image once, and rows share its features.

    pieces of rows --PromptImages.patches--> patches, a few images at a time --actor.image_features--> remote column
                   Start.images, and the columns image_pieces, image_grids, image_features  <--ColumnPiece by digest--

Features are held where ranks made them. An image that no row has shown for long is forgotten, and read again if it
comes back. With a tower that is trained the actor and generation read its features, made again for every version of
it; patches stay with the ranks for that, and for updates. Other roles read those of the folder's tower.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from megatron_rl.columns import IMAGE_FEATURES
from megatron_rl.dispatch import Future
from megatron_rl.images import Grid, ImagePiece, Pieces
from megatron_rl.records import Batch, Stored, as_held, ragged_from_lengths
from megatron_rl.remote_columns import ColumnPiece, RemoteColumn
from megatron_rl.rollout.slices import ImageInput

ROUND_BYTES = 4 << 20
"""Bytes of patches that are sent together for each rank that reads images: this process holds no more at a time."""
PATCH_BYTES = 3 * 2 * 16 * 16 * 4
"""Bytes of a patch, until one is known."""
MOST_BYTES = 4 << 30
"""Bytes of features beyond which images that no row in flight shows are forgotten."""


class ImageRole(Protocol):
    """The method of a role that reads images."""

    def image_features(self, batch: Batch) -> Future[Batch]:
        """Return `image_features` of rows with `image_grids` and `image_patches`, one image in each."""

    def policy_features(self, batch: Batch, *, with_patches: bool = False) -> Future[Batch]:
        """Return `policy_features` of them, and `image_patches` where asked for."""


PatchesOf = Callable[[Sequence[str]], Sequence[tuple[Grid, torch.Tensor]]]
"""Digests -> grid and patches float32 [patches, values] of each image."""


class TowerUse(NamedTuple):
    """Whose features are read. frozen: those of the folder's tower. trained: those of the actor's own."""

    frozen: bool = True
    trained: bool = False


FROZEN = TowerUse()
FEATURES, TRAINED, PATCHES = "image_features", "policy_features", "image_patches"
"""Columns of an image."""


class ImageFeatures:
    """Features by digest. num_passes: images that towers have read. num_readers: data-parallel ranks that read."""

    def __init__(
        self,
        patches_of: PatchesOf,
        role: ImageRole,
        num_readers: int = 1,
        most_bytes: int = MOST_BYTES,
        round_bytes: int = ROUND_BYTES,
        use: TowerUse = FROZEN,
    ) -> None:
        self._patches_of, self._role, self._use = patches_of, role, use
        self._most_bytes, self._round_bytes = most_bytes, num_readers * round_bytes
        self._known: OrderedDict[str, dict[str, ColumnPiece]] = OrderedDict()
        self._patch_bytes = PATCH_BYTES
        self._version = int(use.trained)
        self.num_passes = 0

    def changed(self) -> None:
        """Note that the actor's weights have changed: a trained tower's features are made again."""
        if self._use.trained:
            self._version += 1
            for columns in self._known.values():
                columns.pop(TRAINED, None)

    def need(self, rows: Iterable[Pieces]) -> None:
        """Have the features of all images of these rows; of others some may be forgotten.

        Raises ConfigError as `PromptImages.patches`, and ValueError for features that do not fit their pieces.
        """
        shown = {piece.digest: piece for pieces in rows for piece in pieces}
        missing = [piece for digest, piece in shown.items() if digest not in self._known]
        while missing:
            taken = self._round(missing)
            self._read(missing[:taken])
            del missing[:taken]
        if self._use.trained:
            self._read_again([piece for digest, piece in shown.items() if TRAINED not in self._known[digest]])
        for digest in shown:
            self._known.move_to_end(digest)
        self._forget(len(self._known) - len(shown))

    def _round(self, missing: Sequence[ImagePiece]) -> int:
        """How many of the first images are read together."""
        size, number = 0, 0
        for piece in missing:
            size += piece.num_patches * self._patch_bytes
            if number and size > self._round_bytes:
                break
            number += 1
        return number

    def _read(self, pieces: Sequence[ImagePiece]) -> None:
        images = self._patches_of([piece.digest for piece in pieces])
        lengths = torch.tensor([len(patches) for _, patches in images])
        grids = torch.tensor([grid for grid, _ in images], dtype=torch.int64)
        patches = torch.cat([patches for _, patches in images]) if len(images) > 1 else images[0][1]
        self._patch_bytes = patches[:1].numel() * patches.element_size()
        batch = Batch(
            image_grids=ragged_from_lengths(grids, torch.ones_like(lengths)),
            image_patches=ragged_from_lengths(patches, lengths),
        )
        given, calls = batch.read_by(IMAGE_FEATURES), list[Future[Batch]]()
        if self._use.frozen:
            calls.append(self._role.image_features(given))
        if self._use.trained:
            calls.append(self._role.policy_features(given, with_patches=True))
        for piece in pieces:
            self._known[piece.digest] = {}
        for call in calls:
            self._take(pieces, call.get())
        self.num_passes += len(pieces)

    def _read_again(self, pieces: Sequence[ImagePiece]) -> None:
        """Have features of the tower as it is now, of images whose patches ranks hold."""
        if not pieces:
            return
        grids = torch.tensor([piece.grid for piece in pieces], dtype=torch.int64)
        held = [[self._known[piece.digest][PATCHES]] for piece in pieces]
        batch = Batch(image_grids=ragged_from_lengths(grids, torch.ones(len(pieces), dtype=torch.int64)))
        batch.add(image_patches=RemoteColumn.of_pieces(held))
        self._take(pieces, self._role.policy_features(batch).get())
        self.num_passes += len(pieces)

    def _take(self, pieces: Sequence[ImagePiece], made: Batch) -> None:
        """Keep the columns of images. Raises ValueError for columns that do not fit them."""
        for name in made.names:
            columns = as_held(made.stored(name)).pieces()
            lengths = [piece.num_patches if name == PATCHES else piece.num_tokens for piece in pieces]
            if lengths != [column.length for column in columns]:
                raise ValueError(f"{len(columns)} rows of {name} do not fit {len(pieces)} images")
            for piece, column in zip(pieces, columns, strict=True):
                self._known[piece.digest][name] = column

    def _forget(self, num_unneeded: int) -> None:
        """Forget images from the oldest on until the others are few enough. num_unneeded: of those at most."""
        size = sum(bytes_of(one) for columns in self._known.values() for one in columns.values())
        while num_unneeded > 0 and size > self._most_bytes:
            _, dropped = self._known.popitem(last=False)
            size, num_unneeded = size - sum(map(bytes_of, dropped.values())), num_unneeded - 1

    def has(self, pieces: Pieces) -> bool:
        """Return whether `need` has the features of these images."""
        return all(piece.digest in self._known for piece in pieces)

    def inputs(self, pieces: Pieces) -> tuple[ImageInput, ...]:
        """Return the images of a request, of which `need` has the features."""
        name = TRAINED if self._use.trained else FEATURES
        return tuple(ImageInput(piece, self._known[piece.digest][name], self._version) for piece in pieces)

    def columns(self, rows: Batch) -> Batch:
        """Return the columns of images of rows with `images`, of which `need` has the features; none where no row has
        an image.
        """
        shown: list[Pieces] = rows.objects("images")
        if not any(shown):
            return Batch()
        counts = torch.tensor([len(pieces) for pieces in shown])
        numbers = [piece.numbers for pieces in shown for piece in pieces]
        grids = [piece.grid for pieces in shown for piece in pieces]
        names = [*([FEATURES] if self._use.frozen else []), *([TRAINED, PATCHES] if self._use.trained else [])]
        return Batch(
            image_pieces=ragged_from_lengths(torch.tensor(numbers, dtype=torch.int64), counts),
            image_grids=ragged_from_lengths(torch.tensor(grids, dtype=torch.int64), counts),
            **{name: self._column(name, shown) for name in names},
        )

    def _column(self, name: str, shown: Sequence[Pieces]) -> Stored:
        return RemoteColumn.of_pieces([[self._known[piece.digest][name] for piece in pieces] for pieces in shown])


def passes_metric(images: ImageFeatures | None) -> dict[str, float]:
    """Return how many images the tower has read since the start, as a metric; {} where prompts are text."""
    return {} if images is None else {"images/tower_passes": float(images.num_passes)}


def bytes_of(piece: ColumnPiece) -> int:
    """Return the bytes of a piece of a column."""
    return piece.length * torch.Size(piece.part.shape[1:]).numel() * piece.part.dtype.itemsize


def pieces_of(rows: Batch) -> Iterator[Pieces]:
    """Yield the images of each row; none of rows that are text."""
    yield from rows.objects("images") if "images" in rows else ()
