"""Passes over blocks with images: positions for rotary angles, features in place of image tokens' embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError
from megatron_rl.experience.image_positions import BlockImages, ImageMarks
from megatron_rl.experience.micro_batches import MicroBatch
from megatron_rl.model.decoder import angles_per_head, embedding_of, unwrapped
from megatron_rl.model.families import ImageForm
from megatron_rl.model.image_tokens import ImageTokens, has_levels
from megatron_rl.model.segments import PaddedRows, Segments
from megatron_rl.parallel.mpu import TrainGroups


@dataclass(frozen=True)
class ImagePasses:
    """How the passes of a pipeline read images. num_parts: ranks that share a sequence under sequence parallelism."""

    form: ImageForm
    axes: Tensor
    groups: TrainGroups
    num_parts: int

    @classmethod
    def of(cls, chunks: Sequence[Any], groups: TrainGroups, num_parts: int) -> ImagePasses | None:
        """Return those of a model; None: it does not read images."""
        model = unwrapped(chunks[0])
        form: ImageForm | None = getattr(model, "image_form", None)
        if form is None:
            return None
        return cls(form, torch.tensor(form.axes(angles_per_head(model))), groups, num_parts)

    @property
    def marks(self) -> ImageMarks:
        """The marks of image tokens."""
        return ImageMarks(self.form.token, self.form.merge)

    def segments(self, block: MicroBatch, segments: Segments | None) -> Segments | None:
        """Return the segments of a block, on the CPU, with the positions of its images' tokens."""
        if block.images is None:
            return segments
        if segments is None:
            length = block.input_ids.shape[1]
            segments = PaddedRows(max_seqlen_q=length, max_seqlen_kv=length)
        return replace(segments, image_positions=block.images.positions, axes=self.axes)

    def tokens(self, images: BlockImages, device: torch.device) -> ImageTokens:
        """Return the image tokens of this rank's part of the hidden states, on the device."""
        columns = images.numbers.T
        if self.num_parts > 1:
            columns = columns.chunk(self.num_parts)[self.groups.tp_group.rank()]
        places = columns.flatten().nonzero().flatten()
        assert images.features is not None
        features = images.features.values()[columns.flatten()[places] - 1]
        return ImageTokens(places.to(device), features.to(device, non_blocking=True))

    def embedded(self, model: Any, input_ids: Tensor, positions: Tensor, tokens: ImageTokens) -> Tensor:
        """Return the first layer's input for a block with images, [S, b, H] or this rank's part of S.

        Raises ConfigError where the first chunk has not all layers that read features.
        """
        chunk = unwrapped(model)
        if not has_levels(chunk, self.form.levels):
            raise ConfigError(
                f"the first {self.form.levels} layers read features of images, and the first stage, or its first "
                "chunk, has fewer; give it more layers"
            )
        embedding: Any = embedding_of(chunk)
        return tokens.replaced(embedding(input_ids=input_ids, position_ids=positions))
