"""Programs that the kernel confines to a folder (`sandbox`), and folders that can be removed with any content."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_rl.cluster.programs import Program
from megatron_rl.user_code import sandbox


class ConfinedProgram(Program):
    """A program that can write in one folder alone. status: after `close`, what the sandbox wrote: see there."""

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        own: Path,
        *,
        has_totals: bool = False,
        **options: Any,
    ) -> None:
        """Start it. own: the folder in which it can write. has_totals: all its processes together have limits. options:
        of `Program`.
        """
        self.status = b""
        self._status, written = os.pipe()
        os.set_blocking(self._status, False)
        totals = ["--totals"] if has_totals else []
        confined = [sys.executable, "-I", "-S", sandbox.__file__, *totals, str(written), str(own), *command]
        try:
            super().__init__(confined, variables, passed=(written,), **options)
        except OSError:
            os.close(self._status)
            raise
        finally:
            os.close(written)

    def close(self) -> int:
        """Close as `Program.close`."""
        code = super().close()
        with suppress(BlockingIOError):
            self.status = os.read(self._status, 4096)
        os.close(self._status)
        return code


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Make an empty folder, removed at the end with all that is in it."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder of any depth: inner content moves up to the folder itself, so that no path gets long.

    Links are not followed.
    """
    number = 0
    while names := os.listdir(folder):
        for name in names:
            inner = folder / name
            if inner.is_symlink() or not inner.is_dir():
                inner.unlink(missing_ok=True)
                continue
            inner.chmod(0o700)
            for held in os.listdir(inner):
                number += 1
                (inner / held).rename(folder / f"moved.{number}")
            inner.rmdir()
    folder.rmdir()
