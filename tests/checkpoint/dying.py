"""A process that dies at a chosen instant of what it does to the disk, and what the disk may then look like.

Nothing in the package knows of it: a forked child counts its own file-system operations, which Python's audit hooks
tell, and fsyncs, and ends itself before one of them as `kill -9` would. A file that reached the disk by fsync is known
by its time of modification, which any later write changes.
"""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

CHANGES_NAMES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
SYNCED_NS = 10**9
"""When files that are on the disk say they were modified: one second after 1970 began."""

KILLED, RAISED = 9, 1


@dataclass(frozen=True)
class Death:
    """What a child did until it died or came to its end.

    ended: it came to its end. told: what it reported, in order. torn: the file that it had opened for writing last, if
    that was its last operation: all or a part of its content may be there.
    """

    ended: bool
    told: tuple[str, ...]
    torn: Path | None


def die_before(number: int, action: Callable[[Callable[[object], None]], object], root: Path) -> Death:
    """Run `action`(tell) in a child that dies before its operation `number` (0: the first) on files below `root`.

    Raises AssertionError where the action itself failed.
    """
    mine, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(mine)
        _be_the_child(number, action, root, theirs)
    os.close(theirs)
    with open(mine) as file:
        lines = file.read().splitlines()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, KILLED), "the action raised: see what it printed"
    last = lines[-1].partition(" ") if lines else ("", "", "")
    told = tuple(text.removeprefix("told ") for text in lines if text.startswith("told "))
    return Death(code == 0, told, Path(last[2]) if last[0] == "wrote" else None)


def every_instant(
    action: Callable[[Callable[[object], None]], object], prepare: Callable[[int], Path], most: int = 400
) -> Iterator[tuple[Path, Death]]:
    """(root, death) for each instant of `action`, the last one of a child that came to its end.

    prepare: makes a folder for the attempt with this number; `action` is told the folder by os.chdir.
    """
    for number in range(most):
        root = prepare(number)
        death = die_before(number, lambda tell, root=root: action(root, tell), root)
        yield root, death
        shutil.rmtree(root)
        if death.ended:
            return
    raise AssertionError(f"more than {most} operations")


def unsynced(root: Path) -> list[Path]:
    """Files whose content a power cut may take: written, and not on the disk."""
    return [path for path in _files(root) if path.stat().st_mtime_ns != SYNCED_NS]


def sync_all(root: Path) -> None:
    """Say of everything below `root` that it is on the disk: it was there before the child began."""
    for path in _files(root):
        os.utime(path, ns=(SYNCED_NS, SYNCED_NS))


def content(root: Path) -> dict[str, bytes]:
    """Path below `root` -> content of every file."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in _files(root)}


def _files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]


def _be_the_child(number: int, action: Callable, root: Path, pipe: int) -> None:
    """Never returns. One line for each operation goes to `pipe`, which no hook sees."""
    operations = itertools.count()

    def pass_or_die(what: str) -> None:
        if next(operations) == number:
            os._exit(KILLED)
        os.write(pipe, f"{what}\n".encode())

    def hook(event: str, arguments: tuple) -> None:
        if event in CHANGES_NAMES:
            pass_or_die(event)
        elif event == "open" and arguments[2] & WRITES and os.fspath(arguments[0]).startswith(str(root)):
            pass_or_die(f"wrote {os.fspath(arguments[0])}")

    def noted_fsync(descriptor: int) -> None:
        pass_or_die("fsync")  # a process that dies needs no more: the system keeps what it was given
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.utime(descriptor, ns=(SYNCED_NS, SYNCED_NS))

    os.fsync = noted_fsync
    sys.addaudithook(hook)
    code = RAISED
    try:
        action(lambda what: os.write(pipe, f"told {what}\n".encode()))
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)
