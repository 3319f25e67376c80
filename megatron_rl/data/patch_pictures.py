"""Patches -> PNG: the picture that a model was shown, after it was resized. Encoded again from pixels alone, so that
nothing else of a file goes along.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy
from numpy.typing import NDArray
from PIL import Image

from megatron_rl.images import Grid

MEAN, DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Those of transformers' image processor of Qwen2-VL, where a folder names none."""


def png_of_patches(patches: NDArray[numpy.float32], grid: Grid, settings: Mapping[str, Any]) -> bytes:
    """Return the first frame of an image as PNG.

    patches: [t * h * w, channels * frames * size * size], in groups of merge x merge neighbours. settings: the folder's
    image processor.
    """
    merge, size = int(settings.get("merge_size", 2)), int(settings.get("patch_size", 14))
    frames, (t, h, w) = int(settings.get("temporal_patch_size", 2)), grid
    parts = patches.reshape(t, h // merge, w // merge, merge, merge, -1, frames, size, size)[0, ..., 0, :, :]
    pixels = parts.transpose(0, 2, 5, 1, 3, 6, 4).reshape(h * size, w * size, -1)
    if settings.get("do_normalize", True):
        mean, deviation = settings.get("image_mean") or MEAN, settings.get("image_std") or DEVIATION
        pixels = pixels * numpy.asarray(deviation, numpy.float32) + numpy.asarray(mean, numpy.float32)
    if settings.get("do_rescale", True):
        pixels = pixels / float(settings.get("rescale_factor") or 1 / 255)
    image = Image.fromarray(pixels.round().clip(0, 255).astype(numpy.uint8), "RGB")
    image.save(content := io.BytesIO(), "PNG")
    return content.getvalue()
