"""Notices that replicas are to leave: lines of a file in the run's folder, and of a URL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.error import URLError
from urllib.request import urlopen

DRAIN_FILE = "drain"
"""The file in the run's folder. A line is the number of a replica or the address of a node; # begins a remark."""
READ_S = 5.0
"""Seconds from one reading of the URL to the next, and the longest that one may take."""
MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class Notices:
    """Names of replicas and nodes -> the file or URL that has them."""

    places: Mapping[str, str]

    def of(self, replica: int, hosts: Set[str]) -> str:
        """The notice that names the replica, by its number or the address of a node of it; "" without one."""
        named = sorted({str(replica), *hosts} & self.places.keys())
        return f"{self.places[named[0]]} names {named[0]}" if named else ""


class DrainNotices:
    """A context manager; a thread reads the URL, if there is one. say: prints a line, from any thread."""

    def __init__(self, file: Path, url: str | None, say: Callable[[str], None]) -> None:
        self._file, self._url, self._say = file, url, say
        self._from_url: frozenset[str] = frozenset()
        self._has_said_file = False
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._read_url, name="drain notices", daemon=True)

    def __enter__(self) -> Self:
        if self._url is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()  # a reading may take READ_S more

    def read(self) -> Notices:
        """What the file says now, and what the URL said last."""
        from_url = dict.fromkeys(self._from_url, str(self._url))
        return Notices(from_url | dict.fromkeys(self._in_file(), str(self._file)))

    def _in_file(self) -> frozenset[str]:
        try:
            names = named_in(self._file.read_text(errors="replace"))
        except FileNotFoundError:
            return frozenset()
        except OSError as error:
            if not self._has_said_file:
                self._say(f"{self._file} cannot be read, and counts as empty: {error.strerror}")
            self._has_said_file = True
            return frozenset()
        return names

    def _read_url(self) -> None:
        """Read again and again; what was read last counts where the URL does not answer."""
        assert self._url is not None
        has_said = False
        while not self._ends.wait(READ_S):
            try:
                with urlopen(self._url, timeout=READ_S) as answer:
                    self._from_url = named_in(answer.read(MOST_BYTES).decode(errors="replace"))
                has_said = False
            except (URLError, OSError, ValueError) as error:
                if not has_said:
                    self._say(
                        f"actor_rollout_ref.rollout.drain_url={self._url} does not answer, and is asked on: {error}"
                    )
                has_said = True


def named_in(text: str) -> frozenset[str]:
    """The names in a notice, one in a line."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return frozenset(line for line in lines if line)
