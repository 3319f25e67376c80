"""Features of images in place of the embeddings of their tokens, and added behind the first layers.

Legend: S x b positions of the hidden states, under sequence parallelism this rank's part of S; H hidden size; D levels
of features for layers; n image tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.model.decoder import Chunk, embedding_of, layers_of
from megatron_rl.model.families import ImageForm


@dataclass(frozen=True)
class ImageTokens:
    """The image tokens of a pass. places: int64 [n], of S x b positions, line after line of S. embeddings: [n, H], in
    place of those of the tokens. levels: [n, H * D], for the layers."""

    places: Tensor
    embeddings: Tensor
    levels: Tensor

    @classmethod
    def of(cls, places: Tensor, features: Tensor, num_levels: int) -> ImageTokens:
        """Take the features [n, H * (1 + D)] of tokens, which may have gradients."""
        size = features.shape[1] // (1 + num_levels)
        if not (features.requires_grad and num_levels):
            return cls(places, features[:, :size], features[:, size:])
        levels = features[:, size:].detach().requires_grad_()
        embeddings: Tensor = JoinedGradients.apply(features, [levels], size)
        return cls(places, embeddings, levels)

    def replaced(self, embeddings: Tensor) -> Tensor:
        """Return embeddings [S, b, H] with features at the image tokens, whose own embeddings get no gradient."""
        return embeddings.index_put(self._where(embeddings), self.embeddings.to(embeddings.dtype))

    def added(self, hidden: Tensor, level: int) -> Tensor:
        """Return hidden states [S, b, H] behind layer `level` with the features for them."""
        size = hidden.shape[2]
        features = self.levels[:, level * size : (level + 1) * size].to(hidden.dtype)
        return hidden.index_put(self._where(hidden), features, accumulate=True)

    def _where(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.places // hidden.shape[1], self.places % hidden.shape[1]


class JoinedGradients(torch.autograd.Function):
    """The part of features that is embedded, whose backward pass goes through the tower with the gradients of all.

    Levels are read by layers, which a backward pass may recompute by a backward pass of their own, and that must not go
    through the tower. All layers have ended their backward passes when the embedding's begins.
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor, levels: list[Tensor], size: int) -> Tensor:
        """Return the first `size` columns. levels: the others, one leaf that collects their gradients; in a list, as
        autograd would wait with these for an argument's."""
        (ctx.levels,) = levels
        return features[:, :size].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Join both gradients."""
        levels = ctx.levels
        of_levels = torch.zeros_like(levels) if levels.grad is None else levels.grad
        levels.grad = None
        return torch.cat([gradients[0], of_levels], dim=1), None, None


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
