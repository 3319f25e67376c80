"""Pictures of a run's samples, next to its tables: DIGEST.png in the folder `images`, for `megatron-rl view`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.data.prompt_images import PromptImages
from megatron_rl.errors import ConfigError
from megatron_rl.observe.appended_file import replace_file
from megatron_rl.records import Batch

FOLDER = "images"
MOST_NEW = 16
"""Pictures written with one table: each is read and encoded again."""


class WrittenPictures:
    """Writes pictures once. png_of: digest -> a picture as PNG; it may raise ConfigError."""

    def __init__(self, folder: Path, png_of: Callable[[str], bytes]) -> None:
        self._folder, self._png_of = folder / FOLDER, png_of

    def add(self, rows: Batch, table: Sequence[dict[str, Any]]) -> None:
        """Name the images of each row in a table of these rows, and write some of the pictures. Raises OSError."""
        if "images" not in rows:
            return
        new = dict.fromkeys(piece.digest for pieces in rows.objects("images") for piece in pieces)
        self._write([digest for digest in new if not self._file(digest).exists()][:MOST_NEW])
        for entry, pieces in zip(table, rows.objects("images"), strict=True):
            if pieces:
                entry["images"] = [piece.digest for piece in pieces]

    def _write(self, digests: Sequence[str]) -> None:
        for digest in digests:
            try:
                content = self._png_of(digest)
            except ConfigError:  # its file has changed: training needs it no more
                continue
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._file(digest), content)

    def _file(self, digest: str) -> Path:
        return self._folder / f"{digest}.png"


def written_pictures(folder: Path, images: PromptImages | None) -> WrittenPictures | None:
    """Return the writer of pictures below a run's folder; None where prompts are text."""
    return None if images is None else WrittenPictures(folder, images.png)
