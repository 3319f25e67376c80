"""Which of several failures is reported, and how: no processes."""

from __future__ import annotations

import asyncio
import errno
import pickle

import pytest

from megatron_rl.cluster.failures import RankFailure, describe, root_cause, to_error
from megatron_rl.cluster.node_agent import Answers, OpenCalls
from megatron_rl.cluster.rank_messages import ProcessDied
from megatron_rl.errors import ConfigError, ParityError, WorkerFailure


def failure(rank: int, wall_time: float, message: str = "bad value", **fields: object) -> RankFailure:
    fields = {"role": "actor", "method": "update_actor", "error_type": "RuntimeError", "traceback": "trace"} | fields
    return RankFailure(rank=rank, message=message, wall_time=wall_time, **fields)


def caught(error: Exception) -> RankFailure:
    try:
        raise error
    except Exception as raised:
        return describe(raised, rank=3, role="critic", method="values")


def test_a_dead_process_outranks_what_its_peers_saw_first() -> None:
    """Would not catch a process that died because of a peer's exception."""
    failures = [failure(0, 1.0), failure(2, 9.0, died=True), failure(1, 2.0, "Connection closed by peer")]
    assert root_cause(failures).rank == 2


@pytest.mark.parametrize(
    "secondary",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:8549",
        "NCCL communicator was aborted on rank 1",
        "Timed out waiting 1800000ms for recv operation to complete",
        "Broken pipe",
    ],
)
def test_a_lost_peer_is_blamed_only_when_there_is_nothing_else(secondary: str) -> None:
    """Would not catch a collective library that words the loss of a peer in a new way."""
    lost = failure(0, 1.0, secondary)
    assert root_cause([lost, failure(1, 5.0)]).rank == 1
    assert root_cause([failure(1, 5.0, secondary), lost]).rank == 0


def test_the_earliest_own_fault_is_the_cause() -> None:
    """Would not catch clocks that differ between nodes."""
    assert root_cause([failure(0, 3.0), failure(1, 2.0), failure(2, 4.0)]).rank == 1


def test_the_message_names_rank_role_verb_traceback_and_the_others() -> None:
    """Would not catch a message that is complete but too long for a terminal."""
    error = to_error([failure(3, 1.0, traceback="  File train.py, line 7"), failure(5, 2.0), failure(4, 2.0)])
    assert type(error) is WorkerFailure and error.exit_code == 3
    assert str(error) == (
        "rank 3 (actor) raised RuntimeError in update_actor: bad value\n\n  File train.py, line 7\n"
        "2 other rank(s) failed after it: 4, 5"
    )


def test_our_own_errors_keep_their_class_and_stay_readable() -> None:
    """Would not catch a subclass whose constructor does more than store its message: its nearest base is raised."""

    class Stricter(ParityError):
        pass

    for raised, expected in ((ConfigError("tp(3) != 4"), ConfigError), (Stricter("tp(3) != 4"), ParityError)):
        error = to_error([caught(raised)])
        assert type(error) is expected
        assert str(error) == "rank 3 (critic), in values: tp(3) != 4"
        assert "in caught" not in str(error) and "tp(3) != 4" in error.__notes__[0]


def test_a_failure_is_picklable_even_if_the_exception_is_not() -> None:
    """Would not catch an exception whose `str` itself fails."""

    class Local(Exception):
        pass

    error = Local("cannot travel")
    error.handle = open  # noqa: SIM115 - any unpicklable neighbour will do
    copy = pickle.loads(pickle.dumps(caught(error)))
    assert (copy.error_type, copy.message, copy.rank) == ("Local", "cannot travel", 3)
    assert copy.error_class is WorkerFailure


def test_an_error_in_one_part_of_a_call_is_not_that_of_its_other_ranks() -> None:
    """On the agent of a node: one part cannot be delivered, one rank dies, one is slow, and the call is forgotten once
    all of that is told. Would not catch an error that the driver makes of its own.
    """

    async def part(seconds: float, error: Exception | None = None) -> bytes:
        await asyncio.sleep(seconds)
        if error is not None:
            raise error
        return b"reply"

    async def told() -> list[Answers]:
        calls = OpenCalls()
        full = OSError(errno.ENOSPC, "No space left on device")
        calls.begin(7, [part(0, full), part(0, ProcessDied("it was killed")), part(0), part(0.2)])
        found = [sorted(await calls.rest(7, look_s), key=lambda answer: answer[0]) for look_s in (0.05, 30)]
        assert not len(calls)
        return found

    (undelivered, died, fine), late = asyncio.run(told())
    assert fine == (2, b"reply") and late == [(3, b"reply")]
    for place, (answer, text) in enumerate(zip((undelivered, died), ("No space left", "was killed"), strict=True)):
        assert answer[0] == place and isinstance(answer[1], ProcessDied) and text in str(answer[1])
