"""Pipes of ranks: whole messages in order, whatever their sizes, and one thread however many pipes there are."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection

import pytest

from megatron_rl.cluster.launcher import ProcessInfo
from megatron_rl.cluster.rank_messages import ProcessDied
from megatron_rl.cluster.rank_pipes import LONG, LONGEST_SHORT, READ_AT_ONCE, SHORT, PipeReader, header_of
from megatron_rl.cluster.supervisor_client import LocalRankProcess

pytestmark = pytest.mark.timeout(60)

SIZES = (0, 1, 5, READ_AT_ONCE - SHORT.size, READ_AT_ONCE - SHORT.size + 1, 3, 1 << 22, 2, 1 << 20, 0)
"""Bytes: at the edges of what is read at once, more than a socket holds, and small ones behind them."""


@pytest.fixture
def pipes() -> Iterator[PipeReader]:
    reader = PipeReader()
    yield reader
    reader.close()


def rank_at(pipes: PipeReader) -> tuple[LocalRankProcess, Connection]:
    """The near end of a rank that is up, and the far one."""
    ours, theirs = socket.socketpair()
    rank = LocalRankProcess(ours, partial(ProcessInfo, node_id="node", host="host"), bytes, pipes)
    assert rank.may_start("")
    rank.begin(1)
    return rank, Connection(theirs.detach())


def echo(end: Connection, num: int) -> None:
    for _ in range(num):
        end.send_bytes(end.recv_bytes())


def test_messages_of_every_size_come_whole_and_in_order(pipes: PipeReader) -> None:
    """Sent at once, though the rank reads one after the other. Would not catch a rank that never reads."""
    rank, far = rank_at(pipes)
    sent = [bytes([number]) * size for number, size in enumerate(SIZES)]
    answers = [rank.send(message) for message in sent]
    thread = threading.Thread(target=echo, args=(far, len(sent)), daemon=True)
    thread.start()
    assert [answer.result(30) for answer in answers] == sent
    assert rank.send(b"after the queue") is not None and far.recv_bytes() == b"after the queue"
    far.close()


def test_lengths_are_written_as_connections_write_them() -> None:
    """At the edge of four bytes, which no test could send. Would not catch another form in a later Python."""
    ours, theirs = os.pipe()
    Connection(theirs, readable=False).send_bytes(b"abc")
    assert os.read(ours, 99) == header_of(3) + b"abc"
    os.close(ours)
    assert SHORT.unpack(header_of(LONGEST_SHORT)) == (LONGEST_SHORT,)
    assert LONG.unpack(header_of(LONGEST_SHORT + 1)) == (-1, LONGEST_SHORT + 1)


@pytest.mark.parametrize("is_told_first", [True, False], ids=["end known first", "pipe closed first"])
def test_calls_fail_once_replies_are_read_and_the_end_is_known(pipes: PipeReader, is_told_first: bool) -> None:
    """A reply that was written before the end counts. Would not catch one that is torn, which is no reply."""
    rank, far = rank_at(pipes)
    first, second = rank.send(b"first"), rank.send(b"second")
    far.send_bytes(b"answer")
    if is_told_first:
        rank.end(9)
        far.close()
    else:
        far.close()
        assert first.result(30) == b"answer" and not second.done()
        rank.end(9)
    assert first.result(30) == b"answer"
    for answer in (second, rank.send(b"third")):
        with pytest.raises(ProcessDied, match="killed by SIGKILL"):
            answer.result(30)


def test_a_pipe_whose_reader_fails_does_not_stop_the_others(pipes: PipeReader) -> None:
    """A reply that nobody has asked for. One thread for all. Would not catch a thread that waits in a callback."""
    before = threading.active_count()
    ranks = [rank_at(pipes) for _ in range(50)]
    ranks[0][1].send_bytes(b"of no call")
    assert ranks[0][1].poll(30)  # the near end is closed
    for rank, far in ranks[1:]:
        answer = rank.send(b"message")
        echo(far, 1)
        assert answer.result(30) == b"message"
    assert threading.active_count() == before
