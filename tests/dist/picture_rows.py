"""Random images as a processor would give them, rows that have them, and what transformers makes of both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file
from vision_folders import FIRST_BYTE, FIRST_COLOUR, IMAGE, VIDEO, VISION_END, VISION_START

from megatron_rl.images import Grid, Pieces, digest_of_image, pieces_of_tokens
from megatron_rl.records import Sampling
from megatron_rl.remote_columns import ColumnPiece
from megatron_rl.rollout.slices import ImageInput, Start

MERGE = 2


class Picture(NamedTuple):
    """An image after its processor. patches: float32 [t * h * w, C * T * P * P]."""

    grid: Grid
    patches: torch.Tensor
    digest: str


class ImageRow(NamedTuple):
    """A row. token_ids: with all placeholders. pictures: those that the pieces stand for, in their order."""

    token_ids: tuple[int, ...]
    pieces: Pieces
    pictures: tuple[Picture, ...]


def random_picture(grid: Grid, patch_values: int, generator: torch.Generator) -> Picture:
    patches = torch.randn(torch.Size(grid).numel(), patch_values, generator=generator)
    return Picture(grid, patches, digest_of_image(patches.numpy().tobytes(), grid))


def image_row(parts: Sequence[int | Picture]) -> ImageRow:
    """A row of tokens and images, which stand between their marks."""
    pictures = tuple(part for part in parts if isinstance(part, Picture))
    ids = [[part] if isinstance(part, int) else [VISION_START, IMAGE, VISION_END] for part in parts]
    named = [(picture.digest, picture.grid) for picture in pictures]
    whole, pieces = pieces_of_tokens([token for each in ids for token in each], IMAGE, named, MERGE)
    return ImageRow(tuple(whole), pieces, pictures)


def text(length: int, generator: torch.Generator) -> list[int]:
    """Random tokens that are no marks."""
    return torch.randint(FIRST_BYTE, FIRST_COLOUR, (length,), generator=generator).tolist()


def some_rows(model: torch.nn.Module) -> list[ImageRow]:
    """Rows without an image, with one, with two, with the first one again, and with three; of four sizes."""
    generator = torch.Generator().manual_seed(3)
    of_patch = patch_values(model)
    sizes: tuple[Grid, ...] = ((1, 4, 6), (1, 2, 2), (1, 8, 4), (1, 6, 6))
    small, least, tall, square = (random_picture(size, of_patch, generator) for size in sizes)

    def words(length: int) -> list[int]:
        return text(length, generator)

    begin = words(3)
    return [
        image_row(words(7)),
        image_row([*begin, small, *words(4)]),
        image_row([*words(1), tall, *words(2), square, *words(3)]),
        image_row([*begin, small, *words(2)]),
        image_row([least, small, *words(5), tall, *words(1)]),
    ]


def patch_values(model: torch.nn.Module) -> int:
    """Numbers of a patch of a model of transformers."""
    settings = model.config.vision_config
    channels = getattr(settings, "in_channels", getattr(settings, "in_chans", None))
    return int(channels * settings.temporal_patch_size * settings.patch_size**2)


@torch.no_grad()
def features_of(model: torch.nn.Module, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
    """Digest -> features [tokens, H * (1 + D)], each image alone through the tower of transformers."""
    found = {}
    for picture in pictures:
        made = model.model.visual(picture.patches, grid_thw=torch.tensor([picture.grid]))
        levels = getattr(made, "deepstack_features", None) or []
        found[picture.digest] = torch.cat([made.pooler_output, *levels], dim=1)
    return found


@torch.no_grad()
def logits_of(model: torch.nn.Module, row: ImageRow, response: Sequence[int]) -> torch.Tensor:
    """float32 [len(response), V]: transformers' logits of each token of a response to a row."""
    ids = torch.tensor([[*row.token_ids, *response]])
    images = {}
    if row.pictures:
        images["pixel_values"] = torch.cat([picture.patches for picture in row.pictures])
        images["image_grid_thw"] = torch.tensor([picture.grid for picture in row.pictures])
        images["mm_token_type_ids"] = (ids == IMAGE).int()
    whole = model(input_ids=ids, use_cache=False, **images).logits[0]
    return whole[len(row.token_ids) - 1 : -1].float()


def want_placeholders(path: str) -> str:
    """Let one of the two placeholders have by far the largest logit, whatever the hidden state; returns the path.

    The rows are not read as embeddings, because features stand in their place.
    """
    file = Path(path, "model.safetensors")
    tensors = load_file(file)
    name = next(name for name in (*tensors, "") if name.endswith(("lm_head.weight", "embed_tokens.weight")))
    head = tensors.get("lm_head.weight", tensors[name])
    wanted = 1e5 * head.norm(dim=1).max() * head[40] / head[40].norm()
    head[IMAGE], head[VIDEO] = wanted, -wanted
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def loaded(path: str) -> torch.nn.Module:
    name = json.loads(Path(path, "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def request(number: int, row: ImageRow, features: dict[str, torch.Tensor], sampling: Sampling) -> Start:
    images = tuple(ImageInput(piece, ColumnPiece.whole(features[piece.digest])) for piece in row.pieces)
    return Start(number, row.token_ids, number, sampling.max_tokens, sampling, images=images)
