"""Notices that replicas are to leave: lines of a file in the run's folder, and of a URL."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron_rl.config.file_kinds import read_whole
from megatron_rl.config.urls import shown_url

DRAIN_FILE = "drain"
"""The file in the run's folder. A line is the number of a replica or the address of a node; # begins a remark."""
URL_KEY = "actor_rollout_ref.rollout.drain_url"
READ_S = 5.0
"""Seconds from one reading of the URL to the next, and the longest that one may take."""
MOST_BYTES = 1 << 16
"""Of a list; a longer one is not read in part, because that may leave out or cut off a name."""
LISTS = (200, 204)
"""Statuses of a response that is a list; 204: one without names."""
MOST_NAMED, LONGEST_REASON = 3, 300
NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class Notices:
    """Names of replicas and nodes -> the file or URL that has them."""

    places: Mapping[str, str]

    def of(self, replica: int, hosts: Set[str]) -> str:
        """The notice that names the replica, by its number or the address of a node of it; "" without one."""
        own = {str(replica), *map(plain_address, hosts)}
        named = sorted(name for name in self.places if plain_address(name) in own)
        return f"{self.places[named[0]]} names {named[0]}" if named else ""


class DrainNotices:
    """A context manager; a thread reads the URL, if there is one. say: prints a line, from any thread."""

    def __init__(self, file: Path, url: str | None, say: Callable[[str], None]) -> None:
        self._file, self._url, self._say = file, url, say
        self._shown_url = shown_url(url or "")
        self._from_url: frozenset[str] = frozenset()
        self._said: set[str] = set()
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
        from_url = dict.fromkeys(self._from_url, self._shown_url)
        return Notices(from_url | dict.fromkeys(self._in_file(), str(self._file)))

    def _in_file(self) -> frozenset[str]:
        try:
            text = read_whole(self._file, MOST_BYTES).decode(errors="replace")
        except FileNotFoundError:
            text = ""
        except OSError as error:
            self._say_once("file", f"{self._file} cannot be read, and counts as empty: {error.strerror}")
            return frozenset()
        self._said.discard("file")
        names = named_in(text)
        self._say_strange(str(self._file), names)
        return names

    def _read_url(self) -> None:
        """Read again and again; what was read last counts where the URL does not answer with a list."""
        assert self._url is not None
        while not self._ends.wait(READ_S):
            try:
                names = named_in(asyncio.run(answer_of(self._url)))
                if names and not any(map(is_name, names)):  # a page that says what is wrong, or asks for a password
                    raise ValueError(f"its reply is no list of replicas and nodes; its lines are {some_of(names)}")
            except Exception as error:  # whatever a server answers must not end this thread
                key = f"{URL_KEY}={self._shown_url}"
                self._say_once("url", f"{key} does not respond, and is asked again: {reason_of(error)}")
            else:
                self._said.discard("url")
                self._from_url = names
                self._say_strange(self._shown_url, names)

    def _say_strange(self, place: str, names: frozenset[str]) -> None:
        """Say which lines of a notice can be nobody's name, until there are none."""
        strange = {name for name in names if not is_name(name)}
        if strange:
            rule = "a line is the index of a replica, such as 0, or the address of a node, such as 10.0.0.7"
            self._say_once(place, f"{place} names {some_of(strange)}, which no replica or node is called: {rule}")
        else:
            self._said.discard(place)

    def _say_once(self, topic: str, sentence: str) -> None:
        """Say it, unless something was said of the topic that still holds."""
        if topic not in self._said:
            self._say(sentence)
        self._said.add(topic)


async def answer_of(url: str) -> str:
    """Return the text of a URL, whole, within READ_S.

    Raises what aiohttp raises, TimeoutError, and ValueError for a longer text than MOST_BYTES.
    """
    import aiohttp  # few runs have a URL

    limits = aiohttp.ClientTimeout(total=READ_S)
    # Compressed bytes are not unpacked: a few may become very many.
    async with (
        aiohttp.ClientSession(timeout=limits, trust_env=True, auto_decompress=False) as session,
        session.get(url, headers={"Accept-Encoding": "identity"}, raise_for_status=True) as answer,
    ):
        if answer.status not in LISTS:  # 304 and 206 say themselves that they are not the whole list
            raise ValueError(f"its status is {answer.status}, and a list comes with 200")
        content = b""
        async for piece in answer.content.iter_any():
            content += piece
            if len(content) > MOST_BYTES:
                raise ValueError(f"its reply has more than {MOST_BYTES} bytes")
        return content.decode(errors="replace")


def reason_of(error: Exception) -> str:
    """Return why a URL did not answer, in one line without the URL."""
    if isinstance(error, TimeoutError):
        return f"no complete reply in {READ_S:g} s"
    status, message = getattr(error, "status", None), getattr(error, "message", None)
    said = f"{status} {message}" if status else type(error).__name__
    if status is None:
        said += f": {error}"
    return " ".join(said.split())[:LONGEST_REASON]


def is_name(name: str) -> bool:
    """Whether a line can name a replica or a node: a number as it is printed, or an address."""
    try:
        return bool(NUMBER.fullmatch(name) or ip_address(name))
    except ValueError:
        return False


def plain_address(name: str) -> str:
    """Return an address in its usual spelling, as in `::ffff:10.0.0.7` and `FE80:0:0::1`; any other name as it is."""
    try:
        address = ip_address(name)
    except ValueError:
        return name
    return str((address.ipv4_mapped if isinstance(address, IPv6Address) else None) or address)


def some_of(names: Collection[str]) -> str:
    """Return the first few names with commas, each cut to a length that a line has room for."""
    first = [f"{name[:40]!r}" for name in sorted(names)[:MOST_NAMED]]
    return ", ".join([*first, *(["..."] if len(names) > MOST_NAMED else [])])


def named_in(text: str) -> frozenset[str]:
    """The names in a notice, one in a line."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return frozenset(line for line in lines if line)
