"""Passes over blocks with images: positions for rotary angles, features in place of image tokens' embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError
from megatron_rl.experience.image_positions import BlockImages, BlockPatches, ImageMarks
from megatron_rl.experience.micro_batches import MicroBatch
from megatron_rl.model.decoder import angles_per_head, embedding_of, unwrapped
from megatron_rl.model.families import ImageForm
from megatron_rl.model.image_tokens import ImageTokens, has_levels
from megatron_rl.model.segments import PaddedRows, Segments
from megatron_rl.model.tower import WithoutGradients, trained_features
from megatron_rl.parallel.mpu import TrainGroups


@dataclass(frozen=True)
class ImagePasses:
    """How the passes of a pipeline read images. num_parts: ranks that share a sequence under sequence parallelism.

    tower: the module that is trained, on ranks of the first stage; None: features come with the rows. needs_all: every
    pass must give all its parameters a gradient, as their reduction begins with the last one.
    """

    form: ImageForm
    axes: Tensor
    groups: TrainGroups
    num_parts: int
    hidden_size: int
    tower: torch.nn.Module | None = None
    needs_all: bool = False

    @classmethod
    def of(cls, chunks: Sequence[Any], groups: TrainGroups, num_parts: int) -> ImagePasses | None:
        """Return those of a model; None: it does not read images."""
        model = unwrapped(chunks[0])
        form: ImageForm | None = getattr(model, "image_form", None)
        if form is None:
            return None
        tower, ddp = getattr(model, "vision_tower", None), getattr(chunks[0], "ddp_config", None)
        needs_all = tower is not None and ddp is not None and ddp.overlap_grad_reduce
        axes, hidden_size = torch.tensor(form.axes(angles_per_head(model))), model.config.hidden_size
        return cls(form, axes, groups, num_parts, hidden_size, tower, needs_all)

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
        numbers = columns.flatten()[places] - 1
        if isinstance(images.features, BlockPatches):
            assert self.tower is not None
            made = images.features.features(numbers, self.form.merge, partial(trained_features, self.tower))
            features = self._of_no_token(device) if made is None else made
        else:
            features = images.features.values()[numbers].to(device, non_blocking=True)
        return ImageTokens.of(places.to(device), features, self.form.levels)

    def _of_no_token(self, device: torch.device) -> Tensor:
        return torch.zeros(0, self.hidden_size * (1 + self.form.levels), device=device)

    def embedded(self, model: Any, input_ids: Tensor, positions: Tensor, tokens: ImageTokens | None) -> Tensor | None:
        """Return the first layer's input for a block with images, [S, b, H] or this rank's part of S; None: the model
        makes it itself, of a block without.

        Raises ConfigError where the first chunk has not all layers that read features.
        """
        if tokens is None and not (self.needs_all and torch.is_grad_enabled()):
            return None
        chunk = unwrapped(model)
        if not has_levels(chunk, self.form.levels):
            raise ConfigError(
                f"the first {self.form.levels} layers read features of images, and the first stage, or its first "
                "chunk, has fewer; give it more layers"
            )
        embedding: Any = embedding_of(chunk)
        embedded: Tensor = embedding(input_ids=input_ids, position_ids=positions)
        if tokens is not None:
            embedded = tokens.replaced(embedded)
        if self.tower is not None and self.needs_all and torch.is_grad_enabled():
            embedded = WithoutGradients.apply(embedded, *self.tower.parameters())
        return embedded
