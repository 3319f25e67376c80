"""The sizes of a vision tower, as config.json has them: parameters, FLOPs of an image, size of its features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.model.families.family import Tower
from megatron_rl.model.parts import FP32


@dataclass(frozen=True)
class TowerSizes:
    """The numbers that decide the costs of a tower.

    hidden, inner, depth: sizes and number of its blocks. out: the language model's hidden size. merged: columns of the
    patches that make a token. values: numbers in a patch. places: positions with an embedding; 0: none. levels: further
    rows of features of a token.
    gated: its MLPs are, and its norms have no biases. whole: blocks in which a patch sees its whole image; in the
    others it sees `window` patches.
    """

    hidden: int
    inner: int
    depth: int
    out: int
    merged: int
    values: int
    places: int
    levels: int
    gated: bool
    whole: int
    window: int

    @classmethod
    def of(cls, tower: Tower, given: Mapping[str, Any]) -> TowerSizes:
        """Read the sizes. given: `vision_config` with defaults."""
        hidden, inner, depth, out = (
            int(given[key]) for key in ("hidden_size", "intermediate_size", "depth", "out_hidden_size")
        )
        channels, patch_size = int(given.get("in_channels", given.get("in_chans", 3))), int(given["patch_size"])
        window, whole = 0, depth
        if tower.gated:
            window = (int(given["window_size"]) // patch_size) ** 2
            whole = len(given["fullatt_block_indexes"])
        return cls(
            hidden,
            inner,
            depth,
            out,
            merged=hidden * int(given["spatial_merge_size"]) ** 2,
            values=channels * int(given["temporal_patch_size"]) * patch_size**2,
            places=0 if tower.gated else int(given["num_position_embeddings"]),
            levels=len(given["deepstack_visual_indexes"]) if tower.has_levels else 0,
            gated=tower.gated,
            whole=whole,
            window=window,
        )

    @property
    def num_params(self) -> int:
        """Parameters of patches, blocks and mergers, with biases and norms."""
        hidden, merging = self.hidden, linear(self.merged, self.merged) + linear(self.merged, self.out)
        attention = linear(hidden, 3 * hidden) + linear(hidden, hidden)
        if self.gated:
            mlp = 2 * linear(hidden, self.inner) + linear(self.inner, hidden)
            return self.values * hidden + self.depth * (attention + mlp + 2 * hidden) + hidden + merging
        mlp = linear(hidden, self.inner) + linear(self.inner, hidden)
        patches = linear(self.values, hidden) + self.places * hidden
        blocks = self.depth * (attention + mlp + 4 * hidden)
        return patches + blocks + 2 * hidden + merging + self.levels * (2 * self.merged + merging)

    @property
    def feature_columns(self) -> int:
        """Numbers that stand for a token of an image: in place of its embedding, and for each level."""
        return self.out * (1 + self.levels)

    @property
    def patch_matrices(self) -> int:
        """Elements of the matrices that a patch is multiplied with."""
        mlp = (3 if self.gated else 2) * self.hidden * self.inner
        return self.values * self.hidden + self.depth * (4 * self.hidden**2 + mlp)

    @property
    def token_matrices(self) -> int:
        """Elements of the matrices that a token, merged of patches, is multiplied with."""
        return (1 + self.levels) * self.merged * (self.merged + self.out)

    @property
    def patches_of_token(self) -> int:
        """Patches that make a token."""
        return self.merged // self.hidden

    def kept_bytes(self, num_patches: int, element: int) -> int:
        """Return the bytes that an image's forward pass keeps for the backward pass: both norms of each block, queries,
        keys, values and their joined product, attention twice, and the MLP; the norm and products of mergers.
        """
        mlp = (4 if self.gated else 2) * self.inner
        of_blocks = self.depth * (11 * self.hidden + mlp) + self.hidden
        of_mergers = 3 * self.hidden * (1 + self.levels)
        in_float32 = self.hidden * (2 * self.depth + 1) if self.gated else 0  # norms without biases
        return num_patches * ((self.values + of_blocks + of_mergers) * element + in_float32 * FP32)

    def matrix_flops(self, num_patches: float) -> float:
        """Return the FLOPs of an image's products with matrices, forward."""
        return 2 * num_patches * (self.patch_matrices + self.token_matrices / self.patches_of_token)

    def attention_flops(self, num_patches: float) -> float:
        """Return the FLOPs of an image's attention, forward: each patch sees all, or those of its window."""
        seen = self.whole * num_patches + (self.depth - self.whole) * min(num_patches, self.window)
        return 4 * self.hidden * num_patches * seen


def linear(num_in: int, num_out: int) -> int:
    """Return the parameters of a linear layer with biases."""
    return num_in * num_out + num_out
