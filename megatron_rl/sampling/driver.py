"""The thread that drives rollout replicas through slices while the main thread trains.

It alone calls replicas and waits for their answers; the main thread asks it to, and reads what it has collected. One
lock guards what both touch: what is decided, and the answers.
"""

from __future__ import annotations

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
from megatron_rl.roles.bridge_address import AcrossBridge
from megatron_rl.rollout.slices import Slice
from megatron_rl.sampling.backlog import Backlog
from megatron_rl.sampling.replica_states import ReplicaSlot, ReplicaSlots

TICK_S = 0.005
"""Between two looks at what the main thread asks: it stands still meanwhile, twice or more for each transfer."""

IDLE_S = 0.2
"""Between two looks where no replica is at work."""

LEAVE_S = 0.5
"""For the thread to end by itself."""

LOOK_S = 1.0
"""Between two looks at replicas that nothing is expected of."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Hold:
    """The main thread wants no slice under way. drained: nor a request in an engine."""

    step: int
    drained: bool


@dataclass
class Job:
    """Something that the main thread asks for. result, error: once `is_done`."""

    body: Callable[[], Any]
    is_done: bool = False
    result: Any = None
    error: BaseException | None = None


class Driver:
    """A context manager round the thread, which begins by having all replicas build their engines.

    look: raises in the main thread where another pool has failed. second_buffer: of the replicas.
    """

    def __init__(
        self, slots: ReplicaSlots, work: Backlog, look: Callable[[], None], second_buffer: bool = True
    ) -> None:
        self.slots, self.work, self.second_buffer = slots, work, second_buffer
        self._look = look
        self._changed = threading.Condition(threading.RLock())
        self._jobs: deque[Job] = deque()
        self._waits: dict[Future[Any], tuple[ReplicaSlot, Callable[[Any], None]]] = {}
        self._held: Hold | None = None
        self._error: BaseException | None = None
        self._ends = False
        self._next_look = 0.0
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    def __enter__(self) -> Driver:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        """The thread ends with its present wait; whoever ends the cluster ends that."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join(timeout=LEAVE_S)

    # For the main thread

    @contextmanager
    def locked(self) -> Iterator[Backlog]:
        """Round reading and changing the work; the thread looks again afterwards."""
        with self._changed:
            yield self.work
            self._changed.notify_all()

    def wait_until(self, is_true: Callable[[], bool], meanwhile: Callable[[], None] | None = None) -> None:
        """Wait for something that the thread brings about. Raises what has ended it.

        meanwhile: called now and then, and may raise.
        """
        with self._changed:
            while not is_true():
                self._raise_if_ended()
                self._changed.wait(0.2)
                self._look()
                if meanwhile is not None:
                    meanwhile()
            self._raise_if_ended()

    def ask(self, body: Callable[[], Result]) -> Result:
        """Have the thread run something between two waits, and wait for it. Raises what it raises."""
        job = Job(body)
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()
        self.wait_until(lambda: job.is_done)
        if job.error is not None:
            raise job.error
        result: Result = job.result
        return result

    @contextmanager
    def holding(self, step: int, drained: bool = False) -> Iterator[None]:
        """No slice is under way inside; begins where the schedule may be interrupted after `step`.

        drained: nor is any request unfinished in an engine.
        """
        with self._changed:
            self._held = Hold(step, drained)
            self.work.decider.admits = not drained
        try:
            self.wait_until(lambda: not self._must_go_on() and not any(slot.is_busy for slot in self.slots.living))
            yield
        finally:
            with self._changed:
                self._held = None
                self.work.decider.admits = True
                self._changed.notify_all()

    # For the thread itself

    def call(
        self, slot: ReplicaSlot, call: Callable[[ReplicaSlot], Future[Any]], on_answer: Callable[[Any], None]
    ) -> None:
        """Call a replica and have `on_answer` called with what it answers; a lane whose call fails is lost."""
        try:
            self._waits[call(slot)] = (slot, on_answer)
        except MegatronRLError as error:
            self._lost(slot, error)

    @property
    def has_waits(self) -> bool:
        """Whether an answer is expected."""
        return bool(self._waits)

    def collect(self, timeout: float) -> None:
        """Wait for answers of replicas, at most so long, and hear them."""
        if not self._waits:
            with self._changed:
                if not self._jobs and not self._ends:
                    self._changed.wait(max(timeout, IDLE_S))  # whatever changes wakes it
            return
        for future in wait_any(list(self._waits), timeout):
            if future not in self._waits:
                continue  # its lane was lost with another of these
            slot, on_answer = self._waits.pop(future)
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
                self.build(slot)
            while not self._ends:
                self._do_jobs()
                self._give_orders()
                self.collect(TICK_S)
                self._look_at_replicas()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _look_at_replicas(self) -> None:
        """Notice the end of one that nothing is expected of at the moment."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_S
        for slot in self.slots.present:
            try:
                slot.replica.raise_if_failed()
            except MegatronRLError as error:
                self._lost(slot, error)

    def _do_jobs(self) -> None:
        while self._jobs:
            job = self._jobs.popleft()
            try:
                job.result = job.body()
            except MegatronRLError as error:
                job.error = error
            with self._changed:
                job.is_done = True
                self._changed.notify_all()

    def _give_orders(self) -> None:
        for slot in self.slots.living:
            if slot.is_busy or slot.meets:
                continue
            with self._changed:
                if self._held is not None and not self._must_go_on():
                    continue
                one = self.work.next_slice(slot.number)
                if one is not None:
                    slot.is_busy, slot.named = True, one.version
            if one is not None:
                self.call(slot, partial(advance, one), partial(self._done, slot))

    def build(self, slot: ReplicaSlot, _: None = None) -> None:
        """Have a replica whose processes are up build its engine; it waits for weights afterwards."""
        across = AcrossBridge(first_replica=slot.number, second_buffer=self.second_buffer)
        self.call(slot, lambda slot: slot.host.build(ROLLOUT, across), lambda _: self.slots.built(slot))

    def _must_go_on(self) -> bool:
        """Whether slices must go on before the schedule may be interrupted."""
        if self._held is None or not self.work.decider.may_save(self._held.step):
            return True
        return self._held.drained and any(self.work.engines[slot.number] for slot in self.slots.living)

    def _raise_if_ended(self) -> None:
        if self._error is not None:
            raise self._error

    def _done(self, slot: ReplicaSlot, reports: Any) -> None:
        slot.is_busy = False
        for report in reports:
            self.work.done(report)

    def _lost(self, slot: ReplicaSlot, error: MegatronRLError) -> None:
        for future in [future for future, (owner, _) in self._waits.items() if owner is slot]:
            del self._waits[future]
        with self._changed:
            if slot.lives:
                self.work.lost(slot.number)
            starting = self.slots.lost(slot, error)
            self._changed.notify_all()
        if starting is not None:
            self._waits[starting] = (slot, partial(self.build, slot))
        elif not self.slots.is_hopeful:
            raise self.slots.all_lost(error)


def advance(one: Slice, slot: ReplicaSlot) -> Future[Any]:
    """Have a replica run a slice; the reports of its replicas, which is one."""
    return slot.rollout.advance({slot.number: one})
