"""Images for rehearsed passes: the largest that a prompt can have in front of every row, and the tower's own rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megatron_rl.config.roles import RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.images import ImagePiece
from megatron_rl.planning.image_costs import ImageCosts
from megatron_rl.records import Batch, ragged_from_lengths, row_lengths

IMAGE_FEATURES, POLICY_FEATURES, PATCHES = "image_features", "policy_features", "image_patches"
"""Columns by which passes read images."""
ROWS_OF_TOWER = 2
"""Images that the tower of a rank reads one after the other."""


def add_images(
    batch: Batch, images: ImageCosts, prompts: Sequence[int], dtype: torch.dtype, column: str = IMAGE_FEATURES
) -> None:
    """Let each row begin with an image, as large as its prompt of this many tokens has room for. column: in which they
    are: features in this dtype, or patches.
    """
    form, lengths = images.form, row_lengths(batch["input_ids"])
    tokens = torch.tensor([min(images.most_tokens, prompt) for prompt in prompts])
    firsts = lengths.cumsum(0) - lengths
    places = torch.arange(int(lengths.sum())) - firsts.repeat_interleave(lengths)
    shown = places < tokens.repeat_interleave(lengths)
    made_up = batch.flat("input_ids")
    ids = made_up.masked_fill(made_up == form.token, form.token - 1).masked_fill(shown, form.token)
    grids = [grid_of(number, form.merge) for number in tokens.tolist()]
    # One digest for each row: rows of equal tokens are different prompts.
    pieces = [
        ImagePiece(0, f"{row:032x}", grid, number).numbers
        for row, (grid, number) in enumerate(zip(grids, tokens.tolist(), strict=True))
    ]
    ones = torch.ones_like(tokens)
    if column == PATCHES:
        sizes = torch.tensor(grids).prod(1)
        values = torch.zeros(int(sizes.sum()), form.patch_values)
    else:
        sizes, values = tokens, torch.zeros(int(tokens.sum()), form.tower.feature_columns, dtype=dtype)
    batch.add(
        input_ids=ragged_from_lengths(ids, lengths),
        image_pieces=ragged_from_lengths(torch.tensor(pieces, dtype=torch.int64), ones),
        image_grids=ragged_from_lengths(torch.tensor(grids, dtype=torch.int64), ones),
        **{column: ragged_from_lengths(values, sizes)},
    )


def images_alone(images: ImageCosts) -> Batch:
    """Return the rows of the tower's pass: the largest images, one in each row."""
    grid = grid_of(images.most_tokens, images.form.merge)
    lengths = torch.full((ROWS_OF_TOWER,), math.prod(grid))
    patches = torch.zeros(int(lengths.sum()), images.form.patch_values)
    return Batch(
        image_grids=ragged_from_lengths(torch.tensor([grid] * ROWS_OF_TOWER), torch.ones_like(lengths)),
        image_patches=ragged_from_lengths(patches, lengths),
    )


def grid_of(num_tokens: int, merge: int) -> tuple[int, int, int]:
    """Return the grid of patches, as square as it can be, of an image of `num_tokens` tokens."""
    rows = next(rows for rows in range(math.isqrt(num_tokens), 0, -1) if num_tokens % rows == 0)
    return 1, rows * merge, num_tokens // rows * merge


def reads_images(role: RoleSpec, config: RunConfig) -> bool:
    """Return whether the passes of a role get images: its rows are the actor's tokens."""
    return role.model_path == config.actor_rollout_ref.model.path and not role.reads_text
