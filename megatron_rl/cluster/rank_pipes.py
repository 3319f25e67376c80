"""The near ends of ranks' pipes: one thread reads all of them, so that a process with a thousand ranks has no more.

Two threads a rank, one that reads and one that writes, cost a driver of 512 ranks nine changes of thread a rank and
call, and half its time. Messages have the form of `multiprocessing.connection.Connection`, which ranks use: the length
in 4 bytes, or -1 and the length in 8 more, then the content.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress

SHORT, LONG = struct.Struct("!i"), struct.Struct("!iQ")
LONGEST_SHORT = (1 << 31) - 1
READ_AT_ONCE = 1 << 16
"""Bytes; what is left of a longer message is read into its own memory."""
MOST_READS = 64
"""Reads of one pipe before others have their turn."""
NOW = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


def header_of(length: int) -> bytes:
    """Return the bytes before a message of `length` bytes."""
    return SHORT.pack(length) if length <= LONGEST_SHORT else LONG.pack(-1, length)


class RankPipe:
    """One end. take: called with each message that arrives; ended: once the other end is closed and all was read."""

    def __init__(self, end: socket.socket, take: Callable[[bytes], None], ended: Callable[[], None]) -> None:
        self._end, self._take, self.ended = end, take, ended
        self._arrived = bytearray()
        self._long: bytearray | None = None
        self._filled = 0

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._end.fileno()

    def read(self, room: memoryview) -> bool:
        """Pass on the messages that have arrived, by way of `room`; returns whether more may come."""
        for _ in range(MOST_READS):
            into = room if self._long is None else memoryview(self._long)[self._filled :]
            try:
                num = self._end.recv_into(into, 0, NOW)
            except BlockingIOError:
                return True
            except OSError:
                num = 0
            if not num:
                return False
            if self._long is None:
                self._arrived += room[:num]
                self._pass_on()
            else:
                self._filled += num
                if self._filled == len(self._long):
                    content, self._long = self._long, None
                    into.release()
                    self._take(bytes(content))
                    del content
        return True

    def _pass_on(self) -> None:
        """Pass on the whole messages of `_arrived`; make the memory into which the rest of a long one is read."""
        arrived = self._arrived
        while len(arrived) >= SHORT.size:
            header, (length,) = SHORT, SHORT.unpack_from(arrived)
            if length < 0:
                if len(arrived) < LONG.size:
                    return
                header, (_, length) = LONG, LONG.unpack_from(arrived)
            stop = header.size + length
            if len(arrived) >= stop:
                message = bytes(memoryview(arrived)[header.size : stop])
                del arrived[:stop]
                self._take(message)
                del message  # it may hold what is freed with its last reader
            elif stop > READ_AT_ONCE:
                self._long, self._filled = bytearray(length), len(arrived) - header.size
                self._long[: self._filled] = memoryview(arrived)[header.size :]
                arrived.clear()
                return
            else:
                return


class PipeReader:
    """A thread that reads pipes until `close` and the end of the last of them."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._pipes: dict[int, RankPipe] = {}
        self._changing = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._is_closing = False
        threading.Thread(target=self._run, name="rank reader", daemon=True).start()

    def add(self, pipe: RankPipe) -> None:
        """Read a pipe from now on."""
        with self._changing:
            self._pipes[pipe.fileno()] = pipe
            self._epoll.register(pipe.fileno(), select.EPOLLIN)

    def close(self) -> None:
        """Let the thread end with the last pipe; none may be added after."""
        with self._changing:
            if not self._is_closing:
                self._is_closing = True
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        room = memoryview(bytearray(READ_AT_ONCE))
        while not (self._is_closing and not self._pipes):
            for number, _ in self._epoll.poll():
                if number == self._wake:
                    with suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                else:
                    self._read(number, room)
        self._epoll.close()
        os.close(self._wake)

    def _read(self, number: int, room: memoryview) -> None:
        pipe = self._pipes[number]
        try:
            goes_on = pipe.read(room)
        except Exception:  # one pipe must not stop the others; its rank ends, and that is what calls report
            traceback.print_exc()
            goes_on = False
        if not goes_on:
            with self._changing:
                self._epoll.unregister(number)
                del self._pipes[number]
            pipe.ended()
