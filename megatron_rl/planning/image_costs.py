"""Costs of the images of a step: passes of the vision tower, and features that ranks keep for other roles and engines.

How many images prompts have, and of which size, is not in a configuration. A plan counts one in each prompt, all of
them new, with as many tokens as the limit of pixels and the length of the prompt allow.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config.json_files import UnreadableFileError, read_json_object
from megatron_rl.config.schema import RunConfig
from megatron_rl.model.families import ImageForm, Model
from megatron_rl.model.parts import FP32
from megatron_rl.planning.hardware import Hardware
from megatron_rl.planning.layout_sizes import Layout
from megatron_rl.planning.time import MEMORY_EFFICIENCY, Busy

SETTINGS_FILE = "preprocessor_config.json"
ROUND_BYTES = 4 << 20
"""Bytes of patches that a data-parallel rank gets in a call (`sampling/image_features.py`)."""


@dataclass(frozen=True)
class ImageCosts:
    """The images of a step. num_tokens: mean tokens of an image; most_tokens: tokens of the largest one. element: bytes
    of a feature.
    """

    form: ImageForm
    num_images: int
    num_tokens: int
    most_tokens: int
    element: int

    @classmethod
    def of(
        cls, config: RunConfig, model: Model, element: int, prompt: float | None = None, folder: Path | None = None
    ) -> ImageCosts | None:
        """Return the costs of a run; None where it reads no images. prompt: mean tokens of one, None: the longest.

        folder: has the image processor's limit of pixels, where the configuration has none.
        """
        form, data = model.images, config.data
        if form is None or data.image_key is None:
            return None
        most = data.max_prompt_length
        pixels = data.mm_processor_kwargs.max_pixels or most_pixels(folder)
        if pixels is not None:
            most = max(1, min(most, pixels // (form.patch_size * form.merge) ** 2))
        mean = most if prompt is None else max(1, min(most, int(prompt)))
        return cls(form, config.batch_sizes.num_prompts, mean, most, element)

    @property
    def num_patches(self) -> int:
        """Patches of a mean image."""
        return self.num_tokens * self.form.merge**2

    @property
    def feature_bytes(self) -> int:
        """Bytes of the features of a step, in memory that roles and engines share."""
        return self.num_images * self.num_tokens * self.form.tower.feature_columns * self.element

    @property
    def patch_bytes(self) -> int:
        """Bytes of the patches of a step, which the controller sends in float32."""
        return self.num_images * self.num_patches * self.form.patch_values * FP32

    @property
    def flops(self) -> float:
        """FLOPs of the tower for all images of a step."""
        return self.num_images * sum(self.flops_of_image)

    @property
    def flops_of_image(self) -> tuple[float, float]:
        """FLOPs of the tower for a mean image: with matrices and in attention."""
        tower = self.form.tower
        return tower.matrix_flops(self.num_patches), tower.attention_flops(self.num_patches)

    @property
    def activation_bytes(self) -> int:
        """Bytes of a pass over the largest image: its patches, a block's queries, keys and values, of which two are
        turned in float32, or its MLP, and its features.
        """
        given = self._most_patches * self.form.patch_values * (FP32 + self.element)
        return given + self._block_bytes + self.most_tokens * self.form.tower.feature_columns * self.element

    @property
    def _most_patches(self) -> int:
        return self.most_tokens * self.form.merge**2

    @property
    def _block_bytes(self) -> int:
        tower = self.form.tower
        turned = 4 * tower.hidden * self.element + 4 * tower.hidden * FP32
        mlp = (3 if tower.gated else 2) * tower.inner * self.element
        return self._most_patches * (2 * tower.hidden * self.element + max(turned, mlp))

    def backward_bytes(self, num_tokens: float) -> int:
        """Return the bytes of a trained tower's backward pass, which computes one image at a time once more: all that
        the largest keeps, a running block, and the gradients of the features of a micro-batch.

        num_tokens: image tokens of the micro-batch.
        """
        kept = self.form.tower.kept_bytes(self._most_patches, self.element)
        features = 2 * num_tokens * self.form.tower.feature_columns * self.element
        return int(kept + self._block_bytes + features)

    def rounds(self, num_readers: int) -> int:
        """Return the calls in which the images of a step are read."""
        most = max(1, num_readers * ROUND_BYTES // max(1, self.patch_bytes // self.num_images))
        return math.ceil(self.num_images / most)

    def read(self, layout: Layout, hardware: Hardware, dtype: str, num_towers: int = 1) -> Busy:
        """Return the time of the towers' passes: each data-parallel rank reads its images one by one."""
        tower, patches, num_readers = self.form.tower, self.num_patches, readers(layout)
        rate = hardware.flops(dtype) * hardware.matmul_efficiency
        compute = tower.matrix_flops(patches) / rate * (1 + hardware.half_rows / patches)
        compute += tower.attention_flops(patches) / (rate * hardware.attention_share)
        weights = tower.num_params * self.element / (hardware.memory_bandwidth * MEMORY_EFFICIENCY)
        one = max(compute, weights, tower.depth * hardware.overheads.launch)
        one += self.feature_bytes / self.num_images / hardware.host_bandwidth
        busy = Busy(math.ceil(self.num_images / num_readers) * one, self.num_images * one / layout.num_gpus)
        return busy.times(num_towers)


def readers(layout: Layout) -> int:
    """Return the data-parallel ranks of a layout, each of which has a tower."""
    return layout.dp // layout.cp


def most_pixels(folder: Path | None) -> int | None:
    """Return the most pixels of an image by the image processor of a folder; None: it sets no limit."""
    if folder is None:
        return None
    with suppress(UnreadableFileError, OSError):
        content = read_json_object(folder / SETTINGS_FILE)
        size = content.get("size")
        limits = (content.get("max_pixels"), size.get("longest_edge") if isinstance(size, dict) else None)
        return next((limit for limit in limits if type(limit) is int and limit > 0), None)
    return None
