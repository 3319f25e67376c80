"""Whole messages between two processes, over a socket, without a write that waits for its reader.

    MARK, length of the message (8 bytes), the message        and the next one

Two processes that write to each other with blocking writes stand still for ever once both sockets are full. So `send`
hands over what the other end takes now and queues the rest, which goes out as soon as there is room: in `ready` for a
process that serves many channels in a loop, in `receive` for one that waits for a reply, and in the thread of a
`ServedChannel` for one that does other things meanwhile. `send_whole` alone waits: it is for a process whose reader
never does. The end of the other process is seen at once, however it has ended.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

MARK = b"\x93mrl"
HEADER = struct.Struct("!4sQ")
LONGEST = 1 << 40
"""Bytes of a message between processes that trust each other."""
READ_AT_ONCE = 1 << 18
MOST_READ = 1 << 25
"""Bytes that are read of one channel before others have their turn."""
NOW = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class GarbledError(Exception):
    """What has arrived is no message; the text quotes it."""


class Channel:
    """One end. Any thread may send; one thread receives.

    longest: bytes of a message that may arrive. has_ended: the other end is closed and all of it has been read.
    """

    def __init__(self, end: socket.socket, longest: int = LONGEST) -> None:
        self._socket, self._longest = end, longest
        self._sending = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._is_heard = True  # the other end still takes something
        self._arrived = bytearray()
        self.has_ended = False

    @classmethod
    def pair(cls, longest: int = LONGEST) -> tuple[Channel, Channel]:
        """Return both ends. longest: for the first of them."""
        ours, theirs = socket.socketpair()
        return cls(ours, longest), cls(theirs)

    @classmethod
    def of_descriptor(cls, descriptor: int) -> Channel:
        """Return the end that this process has inherited."""
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end; what is unsent is lost."""
        self._socket.close()

    @property
    def has_arrived(self) -> bool:
        """Whether something is there that `take` has not given yet, though nothing more may come."""
        try:
            return self._end_of_next() is not None
        except GarbledError:
            return True

    @property
    def has_unsent(self) -> bool:
        """Whether a part of a message waits until the other end takes it."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Send a message, or queue what the other end does not take now. Never waits; an ended one gets nothing."""
        with self._sending:
            self._queue(message)
            self._write()

    def send_whole(self, message: bytes) -> None:
        """Send a message and wait until the other end has taken it, or has ended. Its process must never wait for this
        one.
        """
        with self._sending:
            self._queue(message)
            while self._write():
                _poll([(self.fileno(), select.POLLOUT)], None)

    def flush(self) -> None:
        """Send of the queue what the other end takes now."""
        with self._sending:
            self._write()

    def take(self) -> Iterator[bytes]:
        """Yield the messages that have arrived, without waiting for more.

        Raises GarbledError after the messages before it.
        """
        self._read()
        while message := self._next():
            yield message[0]

    def receive(self) -> bytes:
        """Wait for one message, and send the queue meanwhile. Raises EOFError where the other end has ended,
        GarbledError.
        """
        message = self.receive_within(None)
        assert message is not None  # without a limit there is no other end of the wait
        return message

    def receive_within(self, timeout_s: float | None) -> bytes | None:
        """Receive as `receive`; None: there was no message in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if message := self._next():
                return message[0]
            if self.has_ended:
                raise EOFError("the other process has closed its end")
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            ready([self], timeout_s=left)
            self._read()

    def _queue(self, message: bytes) -> None:
        if self._is_heard:
            # In one piece: a copy of this process that was forked by the user's code may use the same socket.
            self._unsent.append(memoryview(HEADER.pack(MARK, len(message)) + message))

    def _write(self) -> bool:
        """Send what the other end takes now; returns whether something is left."""
        try:
            while self._unsent:
                part = self._unsent[0]
                sent = self._socket.send(part, NOW)
                if sent < len(part):
                    self._unsent[0] = part[sent:]
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            return True
        except OSError:  # it has ended; what it has sent before may still be read
            self._is_heard = False
            self._unsent.clear()
        return False

    def _read(self) -> None:
        for _ in range(0, MOST_READ, READ_AT_ONCE):
            try:
                content = self._socket.recv(READ_AT_ONCE, NOW)
            except BlockingIOError:
                return
            except OSError:
                content = b""
            if not content:
                self.has_ended = True
                return
            self._arrived += content

    def _next(self) -> tuple[bytes] | None:
        """Take one message off what has arrived. Raises GarbledError."""
        end = self._end_of_next()
        if end is None:
            return None
        message = bytes(memoryview(self._arrived)[HEADER.size : end])
        del self._arrived[:end]
        return (message,)

    def _end_of_next(self) -> int | None:
        """Return the bytes of the next message with its header; None: it has not arrived. Raises GarbledError."""
        arrived = self._arrived
        if not MARK.startswith(arrived[: len(MARK)]):
            raise GarbledError(repr(bytes(arrived[:80])))
        if len(arrived) < HEADER.size:
            return None
        _, length = HEADER.unpack_from(arrived)
        if length > self._longest:
            raise GarbledError(f"a message of {length} bytes; it may have {self._longest}")
        end = HEADER.size + length
        return end if len(arrived) >= end else None


def ready(channels: Iterable[Channel], others: Iterable[int] = (), timeout_s: float | None = None) -> set[int]:
    """Wait until one of the channels or other descriptors has something to read, or one takes a part of its queue,
    which is sent. Returns the descriptors that can be read, of channels that have ended too.
    """
    known = {channel.fileno(): channel for channel in channels}
    arrived = {number for number, channel in known.items() if channel.has_arrived}
    wanted = [(number, select.POLLIN | (select.POLLOUT if each.has_unsent else 0)) for number, each in known.items()]
    events = _poll([*wanted, *((number, select.POLLIN) for number in others)], 0.0 if arrived else timeout_s)
    for number, event in events:
        if event & (select.POLLOUT | select.POLLERR | select.POLLHUP) and number in known:
            known[number].flush()
    return arrived | {number for number, event in events if event & ~select.POLLOUT}


def _poll(wanted: Iterable[tuple[int, int]], timeout_s: float | None) -> list[tuple[int, int]]:
    poll = select.poll()
    for number, event in wanted:
        poll.register(number, event)
    return poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)


class ServedChannel:
    """A channel that a thread of this process serves. Any thread may send, and never waits.

    It hands each message to `receive`, in its thread, and None once the other process has ended or sends no messages.
    """

    def __init__(self, channel: Channel, receive: Callable[[bytes | None], None]) -> None:
        self._channel, self._receive = channel, receive
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="channel", daemon=True)
        self._thread.start()

    def send(self, message: bytes) -> None:
        """Send a message; it is lost if the other process ends before it has read it."""
        self._channel.send(message)
        if self._channel.has_unsent:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close this end."""
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._channel.close()
        os.close(self._wake)

    def _serve(self) -> None:
        channel = self._channel
        while not (self._is_closing or channel.has_ended):
            ready([channel], [self._wake])
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            try:
                for message in channel.take():
                    self._receive(message)
            except GarbledError:
                break
        if not self._is_closing:
            self._receive(None)
