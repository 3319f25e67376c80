"""A message of two pools whose peer is lost, over a backend that only lets the stream wait; with works made by hand."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch

from megatron_rl.hybrid_engine.exchange import BoundStep, Exchange
from megatron_rl.hybrid_engine.transport import Transport
from megatron_rl.observe import liveness


class Work:
    """A message that is over after some looks at it; None: never."""

    def __init__(self, looks: int | None) -> None:
        self.looks, self.num_waits = looks, 0

    def is_completed(self) -> bool:
        if self.looks is None:
            return False
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> None:
        self.num_waits += 1


class Group:
    """A group of NCCL's kind."""

    _device_types = (torch.device("cuda"),)

    def __init__(self, backend: str) -> None:
        self.backend, self.is_aborted = backend, False

    def _get_backend(self, kind):
        return self

    def name(self) -> str:
        return self.backend

    def abort(self) -> None:
        self.is_aborted = True


def test_a_message_that_never_ends_ends_the_transfer():
    """By the deadline, and the group is aborted; training goes on. Would not catch an abort that hangs itself."""
    group, lost = Group("nccl"), Work(None)
    transport = Transport(group, is_own=True, timeout=timedelta(seconds=0.05))
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="a message was not over after 0.05 s; its peer may be lost"):
        transport.finish([Work(3), lost], None)
    assert group.is_aborted and time.monotonic() - started < 5 and not lost.num_waits


@pytest.mark.parametrize(("backend", "is_own"), [("nccl", True), ("gloo", True), ("nccl", False)])
def test_a_message_that_ends_is_waited_for(backend, is_own):
    """Would not catch the stream that waits. Gloo's own wait raises, and NCCL's group of all ranks ends the process."""
    work = Work(2)
    transport = Transport(Group(backend), is_own=is_own, timeout=timedelta(seconds=60))
    transport.finish([work], None)
    assert work.num_waits == 1 and (work.looks < 0) == (backend == "nccl" and is_own)


@pytest.mark.parametrize(("looks", "progress"), [(0, 1), (None, 0)])
def test_only_what_is_over_counts_as_progress(monkeypatch, looks, progress):
    """NCCL's wait returns before a message is over. Would not catch a rank that is hung elsewhere."""
    noted = []
    monkeypatch.setattr("megatron_rl.hybrid_engine.exchange.made_progress", lambda: noted.append(1))
    exchange = object.__new__(Exchange)
    exchange.transport = Transport(Group("nccl"))
    exchange._finish([Work(looks)], BoundStep(0))
    assert len(noted) == progress and liveness is not None
