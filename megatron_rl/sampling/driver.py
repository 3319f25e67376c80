"""The thread that runs slices on the rollout replicas while the main thread trains.

In a loop it does what the main thread asks, gives each idle replica its next slice, waits for replies of replicas and
of environments, and looks for replicas that failed or are to leave. It alone calls replicas. One lock guards what both
threads use: the queue with its scheduler and responses, and the state of replicas.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from megatron_rl.cluster.waiting import wait_any
from megatron_rl.config.roles import ROLLOUT
from megatron_rl.dispatch import Future
from megatron_rl.errors import MegatronRLError
from megatron_rl.roles.transfer_address import TransferSettings
from megatron_rl.rollout.slices import Slice
from megatron_rl.sampling.replica_states import ReplicaSlot, ReplicaSlots, State
from megatron_rl.sampling.request_queue import RequestQueue

TICK_S = 0.005
"""Longest wait for a reply before the thread does what the main thread asks, which waits for it at every transfer."""

IDLE_S = 0.2
"""Longest wait while no replica runs a call."""

LEAVE_S = 0.5
"""Longest wait for the thread's end."""

CHECK_S = 1.0
"""Time between two checks of replicas that have no running call."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Hold:
    """The main thread wants that no slice runs, at a place where the schedule may be interrupted after `step`.

    drained: that no engine has an unfinished request either.
    """

    step: int
    drained: bool


class Driver:
    """Entering starts the thread, which first has all replicas build their engines; leaving ends it.

    slots: the replicas and their states. queue: the requests. check_pools: raises if another pool has failed; the main
    thread calls it while it waits. second_buffer: replicas receive weights into a second buffer. while_waiting: the
    main thread calls it while it waits for anything but a transfer.
    """

    def __init__(
        self, slots: ReplicaSlots, queue: RequestQueue, check_pools: Callable[[], None], second_buffer: bool = True
    ) -> None:
        self.slots, self.queue, self.second_buffer = slots, queue, second_buffer
        self._check_pools = check_pools
        self._changed = threading.Condition(threading.RLock())
        self._jobs: deque[tuple[Callable[[], Any], concurrent.futures.Future[Any]]] = deque()
        self._calls: dict[Future[Any], tuple[ReplicaSlot, Callable[[Any], None]]] = {}
        self._hold: Hold | None = None
        self._error: BaseException | None = None
        self._ends = False
        self._is_sending = False
        self.while_waiting: Callable[[], None] = lambda: None
        self._next_check = 0.0
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    def __enter__(self) -> Driver:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        """Let the thread end after its present wait, which ends with the cluster at the latest."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join(timeout=LEAVE_S)

    # For the main thread

    @contextmanager
    def locked(self) -> Iterator[RequestQueue]:
        """Hold the lock inside, to read or change the queue; the thread looks at it again afterwards."""
        with self._changed:
            yield self.queue
            self._changed.notify_all()

    def wait_until(self, is_true: Callable[[], bool], meanwhile: Callable[[], None] | None = None) -> None:
        """Wait until `is_true` returns true, which the thread brings about. Raises the error that has ended the thread.

        meanwhile: called about every 0.2 s; it may raise.
        """
        with self._changed:
            while not is_true():
                self._raise_if_ended()
                self._changed.wait(0.2)
                self._check_pools()
                if not self._is_sending:
                    self.while_waiting()
                if meanwhile is not None:
                    meanwhile()
            self._raise_if_ended()

    def ask(self, body: Callable[[], Result]) -> Result:
        """Have the thread call `body` between two waits; return what it returns, or raise what it raises."""
        job: concurrent.futures.Future[Result] = concurrent.futures.Future()
        with self._changed:
            self._jobs.append((body, job))
            self._changed.notify_all()
        self.wait_until(job.done)
        return job.result()

    @contextmanager
    def holding(self, step: int, drained: bool = False) -> Iterator[None]:
        """No slice runs inside: wait until the schedule may be interrupted after `step` (`RequestScheduler.may_save`).

        drained: no engine has an unfinished request either.
        """
        with self._changed:
            self._hold = Hold(step, drained)
            self.queue.scheduler.admits = not drained
        try:
            self.wait_until(
                lambda: not self._must_continue() and not any(slot.is_busy for slot in self.slots.generating)
            )
            yield
        finally:
            with self._changed:
                self._hold = None
                self.queue.scheduler.admits = True
                self._changed.notify_all()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """No replica leaves inside, because all take part in a transfer."""
        with self._changed:
            self._is_sending = True
        try:
            yield
        finally:
            with self._changed:
                self._is_sending = False

    # For the thread

    def call(
        self, slot: ReplicaSlot, call: Callable[[ReplicaSlot], Future[Any]], on_reply: Callable[[Any], None]
    ) -> None:
        """Call a replica, and pass its reply to `on_reply` once it is there. A replica whose call fails is lost."""
        try:
            self._calls[call(slot)] = (slot, on_reply)
        except MegatronRLError as error:
            self._lost(slot, error)

    @property
    def has_calls(self) -> bool:
        """Whether a replica runs a call."""
        return bool(self._calls)

    def collect(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for replies of replicas, and pass each to its `on_reply`."""
        if not self._calls:
            with self._changed:
                if not self._jobs and not self._ends:
                    is_awaited = self.queue.has_turns_open or bool(self.queue.scheduler.verdicts.unjudged)
                    self._changed.wait(timeout if is_awaited else max(timeout, IDLE_S))  # any change ends the wait
            return
        for future in wait_any(list(self._calls), timeout):
            if future not in self._calls:
                continue  # its replica was lost with another of these calls
            slot, on_reply = self._calls.pop(future)
            try:
                reply = future.get()
            except MegatronRLError as error:
                self._lost(slot, error)
                continue
            with self._changed:
                on_reply(reply)
                self._changed.notify_all()

    def _run(self) -> None:
        try:
            for slot in self.slots.all:
                if slot.state is not State.AWAY:
                    self.build(slot)
                    continue
                with self._changed:
                    self.queue.lost(slot.number)
            while not self._ends:
                self._do_jobs()
                self._give_orders()
                self.collect(TICK_S)
                self._take_replies()
                self._check_replicas_if_due()
                self._let_leave()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def check_replicas(self) -> None:
        """Find replicas that have failed, also outside of a call."""
        for slot in self.slots.present:
            try:
                slot.replica.raise_if_failed()
            except MegatronRLError as error:
                self._lost(slot, error)

    def _check_replicas_if_due(self) -> None:
        """Every CHECK_S: find failed replicas; in an elastic pool read the notices, and start replicas with room."""
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + CHECK_S
        self.check_replicas()
        if self.slots.elastic is not None:
            self.slots.note_notices()
            for slot in self.slots.all:
                starting = self.slots.come(slot) if slot.state is State.AWAY else None
                if starting is not None:
                    self._calls[starting] = (slot, partial(self.build, slot))
            self.slots.raise_if_too_few()

    def _let_leave(self) -> None:
        """End idle replicas that are to leave, unless a transfer, a save or a validation needs them."""
        for slot in self.slots.all:
            may_end = slot.state in (State.GENERATING, State.JOINING, State.STARTING) and not slot.is_busy
            if not slot.leaves or not may_end or slot.is_paused:
                continue
            with self._changed:
                if self._hold is not None or self._is_sending:
                    continue
                self._drop_calls(slot)
                if slot.state is State.GENERATING:
                    self.queue.lost(slot.number)
                self.slots.left(slot)
                self._changed.notify_all()

    def _take_replies(self) -> None:
        """Take the replies of environments, and verdicts on groups."""
        with self._changed:
            if self.queue.take_replies() | self.queue.judge():
                self._changed.notify_all()

    def _do_jobs(self) -> None:
        """Do what the main thread asks."""
        while self._jobs:
            body, job = self._jobs.popleft()
            try:
                job.set_result(body())
            except MegatronRLError as error:
                job.set_exception(error)
            with self._changed:
                self._changed.notify_all()

    def _give_orders(self) -> None:
        """Give each idle replica its next slice, if the schedule has one."""
        for slot in self.slots.generating:
            if slot.is_busy or slot.is_paused:
                continue
            with self._changed:
                if self._hold is not None and not self._must_continue():
                    continue
                if slot.leaves and self._hold is None:
                    continue
                order = self.queue.next_slice(slot.number)
                if order is not None:
                    slot.is_busy, slot.last_version = True, order.version
            if order is not None:
                self.call(slot, partial(advance, order), partial(self._done, slot))

    def build(self, slot: ReplicaSlot, _: None = None) -> None:
        """Have a started replica build its engine; then it waits for weights."""
        across = TransferSettings(first_replica=slot.number, second_buffer=self.second_buffer)

        def built(_: Any) -> None:
            slot.state = State.JOINING

        self.call(slot, lambda slot: slot.host.build(ROLLOUT, across), built)

    def _must_continue(self) -> bool:
        """Whether more slices must run before the schedule may be interrupted."""
        if self._hold is None or not self.queue.scheduler.may_save(self._hold.step):
            return True
        return self._hold.drained and any(self.queue.engines[slot.number] for slot in self.slots.generating)

    def _raise_if_ended(self) -> None:
        if self._error is not None:
            raise self._error

    def _done(self, slot: ReplicaSlot, reports: Any) -> None:
        """Take the reports of a slice."""
        slot.is_busy = False
        for report in reports:
            self.queue.done(report)

    def _lost(self, slot: ReplicaSlot, error: MegatronRLError) -> None:
        """Give the requests of a failed replica to others, and start it again."""
        self._drop_calls(slot)
        with self._changed:
            if slot.state is State.GENERATING:
                self.queue.lost(slot.number)
            starting = self.slots.lost(slot, error)
            self._changed.notify_all()
        if starting is not None:
            self._calls[starting] = (slot, partial(self.build, slot))

    def _drop_calls(self, slot: ReplicaSlot) -> None:
        for future in [future for future, (owner, _) in self._calls.items() if owner is slot]:
            del self._calls[future]


def advance(order: Slice, slot: ReplicaSlot) -> Future[Any]:
    """Have a replica run a slice; returns a list of one report."""
    return slot.rollout.advance({slot.number: order})
