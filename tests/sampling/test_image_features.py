"""Features of images: one pass for each distinct image, shared by rows, requests and steps, and bounded."""

from __future__ import annotations

import torch

from megatron_rl.images import ImagePiece
from megatron_rl.records import Batch, Sampling, ragged, ragged_from_lengths, row_lengths
from megatron_rl.rollout.slices import Start
from megatron_rl.sampling.image_features import ImageFeatures

GRID = (1, 2, 4)


class Done:
    """A future that is ready."""

    def __init__(self, value) -> None:
        self.get = lambda: value


class Tower:
    """Makes [2, 3] features of 8 patches: their mean, in all places. calls: images of each call."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def image_features(self, batch: Batch) -> Done:
        assert batch["image_grids"].values().tolist() == [list(GRID)] * len(batch)
        assert row_lengths(batch["image_patches"]).tolist() == [8] * len(batch)
        self.calls.append(len(batch))
        made = torch.stack([patches.mean().expand(2, 3) for patches in batch["image_patches"].unbind()])
        return Done(Batch(image_features=ragged_from_lengths(made.flatten(0, 1), torch.full((len(batch),), 2))))


def patches_of(digests):
    return [(GRID, torch.full((8, 5), float(digest))) for digest in digests]


def shown(*digests: int) -> tuple[ImagePiece, ...]:
    return tuple(ImagePiece(3 * place, f"{digest:032}", GRID, 2) for place, digest in enumerate(digests))


def test_each_image_is_read_once() -> None:
    """Eight samples of a prompt, other rows with the same image, and later steps: as many passes as images, few at a
    time; rows have the features of their own images. Would not catch features of an earlier tower.
    """
    tower = Tower()
    features = ImageFeatures(patches_of, tower, round_bytes=2 * 8 * 5 * 4)
    rows = [shown(1, 2)] * 8 + [(), shown(2), shown(3, 1, 3)]
    features.need(rows)
    features.need([shown(3), shown(4)])
    assert features.num_passes == 4 and sum(tower.calls) == 4 and max(tower.calls) == 2
    features.need(rows)
    batch = Batch(images=rows, input_ids=ragged([torch.arange(9)] * len(rows)))
    columns = features.columns(batch)
    assert [row[:, 0].tolist() for row in columns["image_features"].unbind()] == [
        [float(piece.digest) for piece in pieces for _ in range(2)] for pieces in rows
    ]
    assert [len(row) for row in columns["image_grids"].unbind()] == [len(pieces) for pieces in rows]
    assert columns["image_pieces"].unbind()[9].tolist() == [list(rows[9][0].numbers)]
    assert len(columns.stored("image_features").parts) <= 3 and features.num_passes == 4
    assert features.columns(Batch(images=[(), ()])).names == ()


def test_what_no_row_shows_is_forgotten_first() -> None:
    """With room for two images: the oldest goes, those of rows in flight stay, however many they are."""
    tower = Tower()
    features = ImageFeatures(patches_of, tower, most_bytes=2 * 2 * 3 * 4)
    for rows, passes in (([1, 2], 2), ([3], 3), ([2], 3), ([1], 4), ([1, 2, 3], 5), ([4], 6), ([3], 6), ([1], 7)):
        features.need([shown(*rows)])
        assert features.num_passes == passes, rows


def test_a_request_names_the_features_of_its_images() -> None:
    """By the piece of its features, which other requests share. Would not catch another digest than the tower read."""
    features = ImageFeatures(patches_of, Tower())
    features.need([shown(1, 2)])
    images = features.inputs(shown(2))
    assert images[0].piece == shown(2)[0] and images[0].features.length == 2
    start = Start(0, (1, 2), 0, 1, Sampling(1.0, 1.0, -1, 1, 0), images=images)
    assert start.images[0].features.part[images[0].features.first].tolist() == [2.0] * 3
