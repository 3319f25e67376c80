"""Channels: whole messages, no write that waits for its reader, ends that are seen at once."""

from __future__ import annotations

import os
import threading
import time
from queue import SimpleQueue

import pytest

from megatron_rl.cluster.channel import HEADER, MARK, Channel, GarbledError, ServedChannel, ready
from megatron_rl.cluster.child_processes import ForkedChild

pytestmark = pytest.mark.timeout(60)

LARGE = b"x" * (1 << 22)
"""More than a socket holds."""


def test_two_ends_that_only_write_do_not_wait_for_each_other() -> None:
    """Both send far more than the sockets hold before either reads; all comes, in order, with empty messages among it.
    Would not catch memory without a bound: what nobody reads is kept.
    """
    ends = Channel.pair()
    sent = [[b"%d %d " % (end, n) + LARGE * (n % 3 == 0) for n in range(9)] + [b""] for end in range(2)]
    for end, messages in zip(ends, sent, strict=True):
        for message in messages:
            end.send(message)
        assert end.has_unsent
    arrived: list[list[bytes]] = [[], []]
    while any(len(messages) < 10 for messages in arrived):
        ready(ends, timeout_s=10.0)
        for messages, end in zip(arrived, ends, strict=True):
            messages += end.take()
    assert arrived == sent[::-1] and not any(end.has_unsent for end in ends)
    for end in ends:
        end.close()


def test_messages_arrive_in_pieces_and_before_the_end() -> None:
    """Byte by byte, two at once, and the end behind what was sent before it. Would not catch a message that the sender
    has queued when it closes, which is lost.
    """
    ours, theirs = Channel.pair()
    packed = HEADER.pack(MARK, 3) + b"one"
    for byte in packed[:-1]:
        os.write(theirs.fileno(), bytes([byte]))
        assert list(ours.take()) == []
    os.write(theirs.fileno(), packed[-1:] + packed * 2 + packed[:5])
    assert ours.receive() == b"one" and ready([ours]) == {ours.fileno()}  # nothing more comes
    assert list(ours.take()) == [b"one", b"one"] and ours.receive_within(0.01) is None
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive()
    ours.send(LARGE)
    assert ours.has_ended and not ours.has_unsent
    ours.close()


@pytest.mark.parametrize("garbage", [b"h", b"hello", MARK[:2] + b"xx", HEADER.pack(MARK, 101)])
def test_what_is_no_message_is_seen_at_once(garbage: bytes) -> None:
    """Behind a message, which comes first. Would not catch what looks like a message."""
    ours, theirs = Channel.pair(longest=100)
    theirs.send(b"one")
    os.write(theirs.fileno(), garbage)
    messages = ours.take()
    assert next(messages) == b"one"
    with pytest.raises(GarbledError):
        next(messages)
    ours.close()
    theirs.close()


def test_a_thread_sends_and_hears_while_its_process_does_other_things() -> None:
    """A child that reads nothing for a while, then returns all; then it ends, which is heard. `send` takes no time.
    Would not catch a child that reads nothing for ever: what it is sent is kept.
    """

    def child(channel: Channel) -> None:
        channel.receive()
        time.sleep(0.3)
        for _ in range(20):
            channel.send_whole(channel.receive())

    heard: SimpleQueue[bytes | None] = SimpleQueue()
    forked = ForkedChild.start(child)
    served = ServedChannel(forked.channel, heard.put)
    begun = time.thread_time()
    for _ in range(21):
        served.send(LARGE)
    assert time.thread_time() - begun < 1.0
    assert [heard.get() == LARGE for _ in range(20)] == [True] * 20 and heard.get() is None
    served.close()
    assert ready([], [forked.pidfd], 10.0) and forked.end() == 0
    assert not any(thread.name == "channel" for thread in threading.enumerate())
