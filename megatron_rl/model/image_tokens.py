"""Features of images in place of the embeddings of their tokens, and added behind the first layers.

Legend: S x b positions of the hidden states, under sequence parallelism this rank's part of S; H hidden size; D levels
of features for layers; n image tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_rl.model.decoder import Chunk, embedding_of, layers_of
from megatron_rl.model.families import ImageForm


@dataclass(frozen=True)
class ImageTokens:
    """The image tokens of a pass. places: int64 [n], of S x b positions, line after line of S. features: [n,
    H * (1 + D)]: in place of the embedding, then for each level."""

    places: Tensor
    features: Tensor

    def replaced(self, embeddings: Tensor) -> Tensor:
        """Return embeddings [S, b, H] with features at the image tokens, which pass no gradient on."""
        return embeddings.index_put(self._where(embeddings), self._level(0, embeddings))

    def added(self, hidden: Tensor, level: int) -> Tensor:
        """Return hidden states [S, b, H] behind layer `level` with the features for them."""
        return hidden.index_put(self._where(hidden), self._level(1 + level, hidden), accumulate=True)

    def _where(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.places // hidden.shape[1], self.places % hidden.shape[1]

    def _level(self, number: int, hidden: Tensor) -> Tensor:
        size = hidden.shape[2]
        return self.features[:, number * size : (number + 1) * size].to(hidden.dtype)


def read_images(chunks: list[Chunk], form: ImageForm) -> None:
    """Give the chunks of a rank the form in which their model reads images, and the first layers a hook that adds the
    features for them.
    """
    for chunk in chunks:
        vars(chunk)["image_form"] = form
        for number, layer in layers_of(chunk):
            if number < form.levels and embedding_of(chunk) is not None:
                _add_level(layer, number)


def has_levels(chunk: Chunk, num_levels: int) -> bool:
    """Whether a first chunk has all layers that read features."""
    return num_levels <= sum(1 for _ in layers_of(chunk))


def _add_level(layer: Any, number: int) -> None:
    def with_features(layer: Any, given: Any, named: dict[str, Any], out: tuple[Tensor, Any]) -> Any:
        segments = named.get("packed_seq_params")
        if segments is None or segments.images is None:
            return None  # the output stays
        return segments.images.added(out[0], number), *out[1:]

    layer.register_forward_hook(with_features, with_kwargs=True)
