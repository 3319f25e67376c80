"""Where image tokens are: their positions in time, height and width, and in the layout of a block. Pure.

An image of t x h x w merged patches begins at the position p behind the text before it. Its tokens, frame after frame
and line after line, have the positions (p + frame, p + line, p + column). Text continues at p + max(h, w), which is one
number for all three. So no position is beyond the token's place in its row: a table of angles that suffices for text
suffices for images.

Legend: T tokens of rows end to end, in C conversations; I images, of which n tokens stand for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.experience.block_layout import BlockLayout
from megatron_rl.records import Stored, places_in_rows


class ImageMarks(NamedTuple):
    """Marks of image tokens. token: their id. merge: merge x merge patches make one token."""

    token: int
    merge: int


def image_positions(tokens: Tensor, conversations: Tensor, grids: Tensor, marks: ImageMarks) -> Tensor:
    """Return int64 [3, T], the positions of all tokens in time, height and width.

    tokens: int64 [T]. conversations: int64 [C], tokens of each. grids: int64 [I, 3], patches of each image, ordered as
    the tokens. Raises ValueError where image tokens and grids do not fit each other.
    """
    places = (tokens == marks.token).nonzero().flatten()
    frames, lines, columns = (grids // torch.tensor([1, marks.merge, marks.merge])).T
    sizes = frames * lines * columns
    if int(sizes.sum()) != len(places):
        raise ValueError(f"{len(places)} image tokens for images of {sizes.tolist()} tokens")
    image = torch.arange(len(sizes)).repeat_interleave(sizes)
    ends = sizes.cumsum(0)
    advances = torch.ones(len(tokens), dtype=torch.int64)
    advances[places] = 0
    # An image moves what follows it, and not its own tokens.
    advances[places[ends - 1]] = torch.maximum(lines, columns)
    before = advances.cumsum(0) - advances
    starts = conversations.cumsum(0) - conversations
    positions = (before - before[starts].repeat_interleave(conversations)).repeat(3, 1)
    number = places_in_rows(sizes)
    lines, columns = lines[image], columns[image]
    inside = (number // (lines * columns), number // columns % lines, number % columns)
    positions[:, places] += torch.stack(inside)
    return positions


class BlockPatches(NamedTuple):
    """The images of a block for a tower that is trained. grids: int64 [I, 3]. digests: int64 [I, 2], halves of each.
    patches: a column [rows of the block, (patches), values].
    """

    grids: Tensor
    digests: Tensor
    patches: Stored

    def features(self, numbers: Tensor, merge: int, read: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
        """Return the features of these image tokens, of which every distinct image is read once; None: of no token.

        numbers: int64 [n], of image tokens of the block, from 0 on. read: patches and grid of an image -> its tokens'.
        """
        num_patches = self.grids.prod(1)
        sizes = num_patches // merge**2
        ends, values = sizes.cumsum(0), self.patches.values()
        image = torch.searchsorted(ends, numbers, right=True)
        shown = image.unique().tolist()
        first, made, num_made = torch.zeros_like(ends), list[Tensor](), 0
        places = dict[tuple[int, ...], int]()
        starts = (num_patches.cumsum(0) - num_patches).tolist()
        for number in shown:
            digest = tuple(self.digests[number].tolist())
            if digest not in places:
                places[digest] = num_made
                num_made += int(sizes[number])
                patches = values[starts[number] : starts[number] + int(num_patches[number])]
                made.append(read(patches, self.grids[number]))
            first[number] = places[digest]
        if not made:
            return None
        rows = first[image] + numbers - (ends - sizes)[image]
        return torch.cat(made)[rows.to(made[0].device)]


@dataclass(frozen=True)
class BlockImages:
    """The images of a block, on the CPU; b x S: the positions of its layout.

    positions: int64 [3, b, S], of all tokens; 0 for filler. numbers: int64 [b, S], of an image token the number of its
    row in `features`, from 1 on; 0 elsewhere. features: a column [rows of the block, (image tokens), ...], or patches
    for a trained tower; None where no layer of this rank reads them.
    """

    positions: Tensor
    numbers: Tensor
    features: Stored | BlockPatches | None

    @classmethod
    def laid(
        cls,
        tokens: Tensor,
        grids: Tensor,
        features: Stored | BlockPatches | None,
        marks: ImageMarks,
        layout: BlockLayout,
    ) -> BlockImages | None:
        """Return those of sequences with this layout; None: there is no image. Raises as `image_positions`."""
        if not len(grids):
            return None
        positions = image_positions(tokens, layout.lengths, grids, marks)
        is_image = tokens == marks.token
        order, _, _ = layout.laid(torch.arange(1, len(tokens) + 1))
        numbers = torch.nn.functional.pad(is_image.cumsum(0) * is_image, (1, 0))
        return cls(torch.nn.functional.pad(positions, (1, 0))[:, order], numbers[order], features)

    def part(self, columns: Tensor) -> BlockImages:
        """Return them for these columns of the block alone, int64 [S']."""
        return replace(self, positions=self.positions[..., columns], numbers=self.numbers[:, columns])

    def widened(self, right: int, below: int) -> BlockImages:
        """Return them with that many more positions of filler in each line, and as many more lines."""
        filler = (0, right, 0, below)
        positions, numbers = (torch.nn.functional.pad(x, filler) for x in (self.positions, self.numbers))
        return replace(self, positions=positions, numbers=numbers)
