"""Images that are damaged, too large, ambiguous or elsewhere are unreadable one by one, and the others are read."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from megatron_rl.data.image_processor import ImageForms, ImageReader, ReadImage, Unreadable
from megatron_rl.data.image_sources import ImageSource, sources_of, with_image_parts
from megatron_rl.data.row_problems import RowProblem
from megatron_rl.data.template_process import RenderLimits

SETTINGS = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16},
}


def encoded(kind: str = "PNG", mode: str = "RGB", size: tuple[int, int] = (40, 56), **options) -> bytes:
    shape = (size[1], size[0], len(mode)) if len(mode) > 1 and mode != "I;16" else (size[1], size[0])
    values = np.random.RandomState(0).randint(0, 255, shape)
    pixels = values.astype(np.uint16 if mode == "I;16" else np.uint8)
    content = io.BytesIO()
    made = Image.fromarray(pixels) if mode != "CMYK" else Image.fromarray(pixels, "CMYK")
    made.save(content, kind, **options)
    return content.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


def animated(kind: str) -> bytes:
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue", "green")]
    content = io.BytesIO()
    frames[0].save(content, kind, save_all=True, append_images=frames[1:])
    return content.getvalue()


def with_text(size: int) -> bytes:
    note = PngImagePlugin.PngInfo()
    note.add_text("a", "0" * size, zip=True)
    return encoded(pnginfo=note)


PNG, JPEG, WEBP = encoded(), encoded("JPEG"), encoded("WEBP")
HOSTILE: dict[str, tuple[bytes, str]] = {
    **{f"png cut at {n}": (PNG[:n], "unreadable_image") for n in (1, 8, 20, 40, 100, len(PNG) // 2, len(PNG) - 30)},
    **{f"jpeg cut at {n}": (JPEG[:n], "unreadable_image") for n in (2, 20, 300, len(JPEG) // 2)},
    **{f"webp cut at {n}": (WEBP[:n], "unreadable_image") for n in (4, 30, len(WEBP) // 2)},
    "no image": (b"hello", "unreadable_image"),
    "zeros": (bytes(5000), "unreadable_image"),
    "png of zeros": (PNG[:33] + bytes(len(PNG) - 33), "unreadable_image"),
    "wrong checksum": (PNG[:60] + bytes([PNG[60] ^ 255]) + PNG[61:], "unreadable_image"),
    "no pixels": (png(32, 32), "unreadable_image"),
    "0 x 32": (png(0, 32, chunk(b"IDAT", zlib.compress(bytes(97)))), "unreadable_image"),
    "bomb of one colour": (png(50_000, 50_000, chunk(b"IDAT", zlib.compress(bytes(10**6)))), "unreadable_image"),
    "smaller bomb": (png(9_000, 9_000, chunk(b"IDAT", zlib.compress(bytes(10**6)))), "image_size"),
    "bomb in a text": (with_text(2 << 20), "unreadable_image"),
    "1 x 1": (encoded(size=(1, 1)), "image_size"),
    "1 x 40": (encoded(size=(1, 40)), "image_size"),
    "600 x 2": (encoded(size=(600, 2)), "image_size"),
    "16 bits": (encoded(mode="I;16"), "unreadable_image"),
    "cmyk": (encoded("JPEG", "CMYK"), "unreadable_image"),
    **{f"animated {kind}": (animated(kind), "unreadable_image") for kind in ("GIF", "PNG", "WEBP")},
    **{kind: (encoded(kind), "unreadable_image") for kind in ("BMP", "TIFF", "PPM", "ICO")},
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "unreadable_image"),
    "pdf": (b"%PDF-1.4\n", "unreadable_image"),
}
"""Name -> bytes, and the kind of bad row."""


@pytest.fixture
def folder(tmp_path) -> Path:
    images = tmp_path / "images"
    images.mkdir()
    (images / "good.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    (images / "link.png").symlink_to(tmp_path / "secret.png")
    (images / "inner.png").symlink_to(images / "good.png")
    (images / "round").symlink_to(images / "round")
    os.mkfifo(images / "pipe.png")
    (images / "folder.png").mkdir()
    return images


def reader(folder: Path | None = None, **limits) -> ImageReader:
    return ImageReader(ImageForms(SETTINGS, folder), RenderLimits(**limits) if limits else RenderLimits(30, 2 << 30))


def test_each_damaged_image_is_refused_alone(folder) -> None:
    """Forty in one call, each with its kind, and the good one after each of them is read. Would not catch a decoder
    that runs code.
    """
    hostile = {name: (ImageSource(content), kind) for name, (content, kind) in HOSTILE.items()}
    for path in ("../secret.png", "link.png", str(folder.parent / "secret.png"), "a\0b.png", "/etc/passwd"):
        hostile[f"path {path}"] = ImageSource(None, path), "image_outside"
    for path in ("pipe.png", "folder.png", "nothing.png", "round", "good.png/x", "."):
        hostile[f"path {path}"] = ImageSource(None, path), "unreadable_image"
    assert len(hostile) >= 40
    good = [ImageSource(PNG), ImageSource(None, "good.png"), ImageSource(None, str(folder / "inner.png"))]
    sources = [each for source, _ in hostile.values() for each in (source, good[len(source.path) % 3])]
    images = reader(folder)
    read = images.read(sources)
    images.close()
    refused = {name: one.kind for name, one in zip(hostile, read[::2], strict=True) if isinstance(one, Unreadable)}
    assert refused == {name: kind for name, (_, kind) in hostile.items()}
    assert {one.digest for one in read[1::2]} == {read[1].digest}


def test_paths_need_a_folder() -> None:
    (refused,) = reader().read([ImageSource(None, "good.png")])
    assert refused.kind == "image_outside" and "data.image_folder is not set" in refused.reason


def test_time_and_memory_are_limited() -> None:
    """A large image beyond the limits of the child is refused, and the next one is read by another child."""
    Image.new("RGB", (7000, 7000)).save(content := io.BytesIO(), "PNG", compress_level=1)
    large, small = ImageSource(content.getvalue()), ImageSource(PNG)
    for limits, reason in (({"memory_bytes": 60 << 20}, "GB of memory"), ({"cpu_s": 0.05}, "s of CPU time")):
        images = reader(**limits)
        refused, read = images.read([large, small])
        images.close()
        assert refused.kind == "unreadable_image" and reason in refused.reason
        assert isinstance(read, ReadImage)


def test_patches_and_digest_of_an_image() -> None:
    """Sizes by hand; jpeg, webp and grey are read; a picture's digest is that of its pixels, however it is stored."""
    same = encoded(compress_level=9)
    images = reader()
    read = images.read([ImageSource(x) for x in (PNG, same, JPEG, WEBP, encoded(mode="L"))], with_patches=True)
    images.close()
    assert [one.grid for one in read] == [(1, 4, 2)] * 5
    assert read[0].patches.shape == (8, 3 * 2 * 14 * 14) and read[0].patches.dtype == np.float32
    assert read[0].digest == read[1].digest and len({one.digest for one in read}) == 4


def test_a_png_without_its_last_lines_is_read_as_pil_and_transformers_read_it() -> None:
    """Its compressed stream is whole and short: the other lines are black. Would not catch one that is too long."""
    line = b"\0" + bytes([255, 0, 0]) * 28
    short = png(28, 28, chunk(b"IDAT", zlib.compress(line * 10)))
    whole = png(28, 28, chunk(b"IDAT", zlib.compress(line * 10 + (b"\0" + bytes(3 * 28)) * 18)))
    images = reader()
    one, other = images.read([ImageSource(short), ImageSource(whole)])
    images.close()
    assert one.digest == other.digest


def test_what_is_transparent_is_white() -> None:
    clear, white = Image.new("RGBA", (28, 28), (255, 0, 0, 0)), Image.new("RGB", (28, 28), (255, 255, 255))
    contents = []
    for image in (clear, white):
        image.save(content := io.BytesIO(), "PNG")
        contents.append(ImageSource(content.getvalue()))
    images = reader()
    one, other = images.read(contents)
    images.close()
    assert one.digest == other.digest


def test_marks_and_parts_stand_for_images() -> None:
    """By hand: marks in text, parts with fields that parquet fills up with null, and both in one prompt."""
    messages = [
        {"role": "system", "content": "look"},
        {"role": "user", "content": "<image>one<image>"},
        {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "and <image>"}]},
    ]
    image = {"type": "image"}
    assert with_image_parts(messages, 4, "prompt") == [
        messages[0],
        {"role": "user", "content": [image, {"type": "text", "text": "one"}, image]},
        {"role": "user", "content": [image, {"type": "text", "text": "and "}, image]},
    ]
    assert sources_of([{"bytes": b"x", "path": None}, {"bytes": None, "path": "p"}, "q"], "images") == [
        ImageSource(b"x"),
        ImageSource(None, "p"),
        ImageSource(None, "q"),
    ]
    assert sources_of(None, "images") == [] and sources_of("p", "images") == [ImageSource(None, "p")]


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: with_image_parts([{"role": "user", "content": "<image>"}], 2, "prompt"), "image_count"),
        (lambda: with_image_parts([{"role": "user", "content": "<image>"}], 0, "prompt"), "image_count"),
        (lambda: with_image_parts([{"role": "user", "content": [{"type": "video"}]}], 0, "prompt"), "content_not_text"),
        (lambda: with_image_parts([{"role": "user", "content": 3}], 0, "prompt"), "content_not_text"),
        (lambda: sources_of([{"bytes": None, "path": None}], "images"), "not_an_image"),
        (lambda: sources_of([{"bytes": b""}], "images"), "not_an_image"),
        (lambda: sources_of([None], "images"), "not_an_image"),
        (lambda: sources_of([3], "images"), "not_an_image"),
    ],
)
def test_rows_that_do_not_fit_are_refused(call, kind: str) -> None:
    with pytest.raises(RowProblem) as raised:
        call()
    assert raised.value.kind == kind
