"""Encoded images -> patches, in a child process with limits of CPU time and memory: an image is hostile input.

    ImageSource --PIL: header, then pixels--> RGB --image processor of the folder--> patches, grid --> digest

The child returns the digest and the grid of an image, and its patches only where they are asked for.
"""

from __future__ import annotations

import io
import os
import stat
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray
from PIL import Image

from megatron_rl.config.json_files import UnreadableFileError, read_json_object
from megatron_rl.data.image_sources import ImageSource
from megatron_rl.data.row_problems import RowProblem
from megatron_rl.data.template_process import RenderLimits, TemplateProcess, TemplateRefusal
from megatron_rl.errors import ConfigError
from megatron_rl.images import MOST_PIXELS, Grid, digest_of_image

FORMATS = ("PNG", "JPEG", "WEBP")
MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA"}
"""Kinds of pixels that have one meaning in 8-bit RGB."""
MOST_BYTES, LEAST_SIDE, MOST_STRETCHED = 64 << 20, 2, 200
AT_ONCE = 8
"""Images that the child gets together."""
LIMITS = RenderLimits(cpu_s=30.0, memory_bytes=2 << 30)
SETTINGS_FILES = ("preprocessor_config.json", "processor_config.json")
PROCESSORS = {f"Qwen2VLImageProcessor{kind}" for kind in ("", "Fast", "Pil")}
"""Names in folders of the image processor of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5."""


class ReadImage(NamedTuple):
    """An image that the folder's processor has read. patches: float32 [patches, values]; None: not asked for."""

    digest: str
    grid: Grid
    patches: NDArray[numpy.float32] | None = None


class Unreadable(NamedTuple):
    """An image that cannot be used: the kind of bad row, and the reason."""

    kind: str
    reason: str


@dataclass(frozen=True)
class ImageForms:
    """How images of a run are read. settings: the folder's image processor. image_folder: below which paths may
    name files; None: no path is read.
    """

    settings: Mapping[str, Any]
    image_folder: Path | None

    @classmethod
    def of_folder(
        cls, folder: Path, min_pixels: int | None, max_pixels: int | None, image_folder: str | None
    ) -> ImageForms:
        """Return the forms of a model folder; min_pixels, max_pixels: in place of the folder's own.

        Raises ConfigError for a folder without an image processor, or with another one, and for impossible limits.
        """
        settings = _processor_settings(folder)
        kind = settings.get("image_processor_type")
        if kind not in PROCESSORS:
            raise ConfigError(
                f"data.image_key is set, and the image processor of {folder} is {kind}; images are read with "
                "Qwen2VLImageProcessor alone: use a folder of Qwen2.5-VL, Qwen3-VL or Qwen3.5, or data.image_key=null"
            )
        size = dict(settings.get("size") or {})
        least = settings.get("min_pixels") or size.get("shortest_edge")
        most = settings.get("max_pixels") or size.get("longest_edge")
        least, most = (own if asked is None else asked for own, asked in ((least, min_pixels), (most, max_pixels)))
        if not (least and most and 0 < least <= most):
            raise ConfigError(
                f"data.mm_processor_kwargs.min_pixels={least} must be positive and at most "
                f"data.mm_processor_kwargs.max_pixels={most} (a key that is null has the value of {folder})"
            )
        own = {name: value for name, value in settings.items() if name not in ("min_pixels", "max_pixels")}
        folder_of_images = None if image_folder is None else Path(image_folder).expanduser().resolve()
        if folder_of_images is not None and not folder_of_images.is_dir():
            raise ConfigError(f"data.image_folder={image_folder} must be a folder below which images are")
        return cls({**own, "size": {"shortest_edge": least, "longest_edge": most}}, folder_of_images)

    @property
    def merge(self) -> int:
        """merge x merge patches make one token."""
        return int(self.settings.get("merge_size", 2))


def _processor_settings(folder: Path) -> dict[str, Any]:
    for name in SETTINGS_FILES:
        if not (folder / name).is_file():
            continue
        try:
            content = read_json_object(folder / name)
        except UnreadableFileError as error:
            raise ConfigError(f"data.image_key is set, and {folder}/{error}") from None
        settings: dict[str, Any] = content.get("image_processor", content)
        return settings
    raise ConfigError(
        f"data.image_key is set, and {folder} has no {SETTINGS_FILES[0]}: it must be the folder of a model that reads "
        "images, with its image processor; or data.image_key=null"
    )


class ImageReader:
    """Reads images in a child process, which is forked at the first call."""

    def __init__(self, forms: ImageForms, limits: RenderLimits = LIMITS) -> None:
        """forms: as they are checked."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        made = Qwen2VLImageProcessorPil.from_dict(dict(forms.settings))
        self._work = ImageWork(made, forms.image_folder)
        self._process: TemplateProcess[tuple[ImageSource, bool], ReadImage | Unreadable]
        self._process = TemplateProcess(self._work, limits)

    def read(self, sources: Sequence[ImageSource], with_patches: bool = False) -> list[ReadImage | Unreadable]:
        """Return what becomes of each image; one that takes more than the limits is unreadable."""
        read: list[ReadImage | Unreadable] = []
        for first in range(0, len(sources), AT_ONCE):
            items = [(source, with_patches) for source in sources[first : first + AT_ONCE]]
            try:
                read += self._process.map(items)
            except TemplateRefusal:
                read += [self._alone(item) for item in items]
        return read

    def _alone(self, item: tuple[ImageSource, bool]) -> ReadImage | Unreadable:
        try:
            return self._process.map([item])[0]
        except TemplateRefusal as refusal:
            return Unreadable("unreadable_image", str(refusal))

    def close(self) -> None:
        """End the child, if there is one."""
        self._process.close()


@dataclass(frozen=True)
class ImageWork:
    """What the child does with images. processor: of transformers, on PIL and numpy."""

    processor: Any
    image_folder: Path | None

    def __call__(self, items: Sequence[tuple[ImageSource, bool]]) -> list[ReadImage | Unreadable]:
        """Return what becomes of each image."""
        return [self._read(*item) for item in items]

    def _read(self, source: ImageSource, with_patches: bool) -> ReadImage | Unreadable:
        try:
            content = source.content if source.content is not None else file_content(source.path, self.image_folder)
            image = decoded(content)
            made = self.processor(images=[image], return_tensors="np")
        except RowProblem as problem:
            return Unreadable(problem.kind, problem.found)
        except (OSError, ValueError, SyntaxError, ArithmeticError, LookupError, TypeError, RuntimeError) as error:
            return Unreadable("unreadable_image", f"{type(error).__name__}: {error}"[:200])
        except Image.DecompressionBombError as error:
            return Unreadable("unreadable_image", str(error)[:200])
        patches = numpy.ascontiguousarray(made["pixel_values"], dtype=numpy.float32)
        frames, rows, columns = (int(size) for size in made["image_grid_thw"][0])
        grid = (frames, rows, columns)
        return ReadImage(digest_of_image(patches.data.cast("B"), grid), grid, patches if with_patches else None)


def file_content(path: str, folder: Path | None) -> bytes:
    """Return the bytes of an image file. Raises RowProblem for one that is not a file below the folder, OSError."""
    if folder is None:
        raise RowProblem("image_outside", "", f"path {path!r:.80}, and data.image_folder is not set")
    if "\0" in path:
        raise RowProblem("image_outside", "", f"a zero byte in path {path!r:.80}")
    file = Path(os.path.realpath(folder / path))
    if not file.is_relative_to(folder):
        raise RowProblem("image_outside", "", f"path {path!r:.80}, which is not below {folder}")
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)  # a pipe would wait for a writer
    with open(descriptor, "rb") as opened:
        known = os.fstat(descriptor)
        if not stat.S_ISREG(known.st_mode):
            raise RowProblem("unreadable_image", "", f"{path!r:.80} is no file")
        if known.st_size > MOST_BYTES:
            raise RowProblem("unreadable_image", "", f"{known.st_size} bytes, at most {MOST_BYTES}")
        return opened.read()


def decoded(content: bytes) -> Image.Image:
    """Return an encoded image as RGB; what is transparent is white. Sizes are checked before pixels are decoded.

    Raises RowProblem, and errors of PIL for damaged images.
    """
    if len(content) > MOST_BYTES:
        raise RowProblem("unreadable_image", "", f"{len(content)} bytes, at most {MOST_BYTES}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is smaller
        image: Image.Image = Image.open(io.BytesIO(content), formats=FORMATS)
    width, height = image.size
    least, most = min(image.size), max(image.size)
    if width * height > MOST_PIXELS:
        raise RowProblem("image_size", "", f"{width} x {height} pixels")
    if least < LEAST_SIDE or most > MOST_STRETCHED * least:
        raise RowProblem("image_size", "", f"{width} x {height} pixels")
    if (frames := getattr(image, "n_frames", 1)) > 1:
        raise RowProblem("unreadable_image", "", f"{frames} frames")
    if image.mode not in MODES:
        raise RowProblem("unreadable_image", "", f"pixels of kind {image.mode}")
    image.load()
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")
