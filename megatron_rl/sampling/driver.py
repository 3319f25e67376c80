"""The thread that runs slices on the rollout replicas while the main thread trains.

Only this thread calls replicas and waits for their replies. The main thread asks it to, and reads what it has
collected. One lock guards what both threads use: the scheduler and the responses.
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
"""Longest wait for a reply before the thread looks at the main thread's jobs, which block it at every transfer."""

IDLE_S = 0.2
"""Longest wait when no call is running."""

LEAVE_S = 0.5
"""Time that the thread has to end by itself."""

CHECK_S = 1.0
"""Time between two checks of replicas that have no running call."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Hold:
    """The main thread wants no running slice. drained: and no request in an engine."""

    step: int
    drained: bool


class Driver:
    """A context manager around the thread, which first has all replicas build their engines.

    check_pools: raises in the main thread if another pool has failed. second_buffer: replicas have a second buffer.
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
        self._next_check = 0.0
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    def __enter__(self) -> Driver:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        """Let the thread end after its current wait, which ends when the cluster does."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join(timeout=LEAVE_S)

    # For the main thread

    @contextmanager
    def locked(self) -> Iterator[RequestQueue]:
        """Hold the lock to read or change the queue; the thread looks at it again afterwards."""
        with self._changed:
            yield self.queue
            self._changed.notify_all()

    def wait_until(self, is_true: Callable[[], bool], meanwhile: Callable[[], None] | None = None) -> None:
        """Wait for a condition that the thread changes. Raises the error that has ended the thread.

        meanwhile: called every 0.2 s or so; it may raise.
        """
        with self._changed:
            while not is_true():
                self._raise_if_ended()
                self._changed.wait(0.2)
                self._check_pools()
                if meanwhile is not None:
                    meanwhile()
            self._raise_if_ended()

    def ask(self, body: Callable[[], Result]) -> Result:
        """Have the thread run `body` between two waits, and wait for it. Raises what `body` raises."""
        job: concurrent.futures.Future[Result] = concurrent.futures.Future()
        with self._changed:
            self._jobs.append((body, job))
            self._changed.notify_all()
        self.wait_until(job.done)
        return job.result()

    @contextmanager
    def holding(self, step: int, drained: bool = False) -> Iterator[None]:
        """No slice runs inside; begins where the schedule may be interrupted after `step`.

        drained: no engine has an unfinished request either.
        """
        with self._changed:
            self._hold = Hold(step, drained)
            self.queue.scheduler.admits = not drained
        try:
            self.wait_until(lambda: not self._must_go_on() and not any(slot.is_busy for slot in self.slots.generating))
            yield
        finally:
            with self._changed:
                self._hold = None
                self.queue.scheduler.admits = True
                self._changed.notify_all()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """No replica leaves inside, because it takes part in a transfer."""
        with self._changed:
            self._is_sending = True
        try:
            yield
        finally:
            with self._changed:
                self._is_sending = False

    # For the thread

    def call(
        self, slot: ReplicaSlot, call: Callable[[ReplicaSlot], Future[Any]], on_answer: Callable[[Any], None]
    ) -> None:
        """Call a replica and pass its reply to `on_answer`. A replica whose call fails is lost."""
        try:
            self._calls[call(slot)] = (slot, on_answer)
        except MegatronRLError as error:
            self._lost(slot, error)

    @property
    def has_calls(self) -> bool:
        """Whether a call is running."""
        return bool(self._calls)

    def collect(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for replies, and handle them."""
        if not self._calls:
            with self._changed:
                if not self._jobs and not self._ends:
                    is_open = self.queue.has_turns_open or bool(self.queue.scheduler.verdicts.unjudged)
                    waits = timeout if is_open else max(timeout, IDLE_S)
                    self._changed.wait(waits)  # whatever changes wakes it
            return
        for future in wait_any(list(self._calls), timeout):
            if future not in self._calls:
                continue  # its replica was lost with another of these calls
            slot, on_answer = self._calls.pop(future)
            try:
                answer = future.get()
            except MegatronRLError as error:
                self._lost(slot, error)
                continue
            with self._changed:
                on_answer(answer)
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
        """Notice that a replica has failed, also outside of a call."""
        for slot in self.slots.present:
            try:
                slot.replica.raise_if_failed()
            except MegatronRLError as error:
                self._lost(slot, error)

    def _check_replicas_if_due(self) -> None:
        """Look at all replicas, and at the notices of those that come and go."""
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
        """End replicas that are to leave, between two slices and outside of transfers, saves and validations."""
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
        with self._changed:
            if self.queue.take_replies() | self.queue.judge():
                self._changed.notify_all()

    def _do_jobs(self) -> None:
        while self._jobs:
            body, job = self._jobs.popleft()
            try:
                job.set_result(body())
            except MegatronRLError as error:
                job.set_exception(error)
            with self._changed:
                self._changed.notify_all()

    def _give_orders(self) -> None:
        for slot in self.slots.generating:
            if slot.is_busy or slot.is_paused:
                continue
            with self._changed:
                if self._hold is not None and not self._must_go_on():
                    continue
                if slot.leaves and self._hold is None:
                    continue
                order = self.queue.next_slice(slot.number)
                if order is not None:
                    slot.is_busy, slot.last_version = True, order.version
            if order is not None:
                self.call(slot, partial(advance, order), partial(self._done, slot))

    def build(self, slot: ReplicaSlot, _: None = None) -> None:
        """Have a started replica build its engine; it waits for weights afterwards."""
        across = TransferSettings(first_replica=slot.number, second_buffer=self.second_buffer)

        def built(_: Any) -> None:
            slot.state = State.JOINING

        self.call(slot, lambda slot: slot.host.build(ROLLOUT, across), built)

    def _must_go_on(self) -> bool:
        """Whether slices must go on before the schedule may be interrupted."""
        if self._hold is None or not self.queue.scheduler.may_save(self._hold.step):
            return True
        return self._hold.drained and any(self.queue.engines[slot.number] for slot in self.slots.generating)

    def _raise_if_ended(self) -> None:
        if self._error is not None:
            raise self._error

    def _done(self, slot: ReplicaSlot, reports: Any) -> None:
        slot.is_busy = False
        for report in reports:
            self.queue.done(report)

    def _lost(self, slot: ReplicaSlot, error: MegatronRLError) -> None:
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
