"""Send weights from the actor to the replicas, and connect again when replicas start or fail. For the main thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_rl.dispatch import Future
from megatron_rl.errors import WorkerFailure
from megatron_rl.hybrid_engine.hybrid_engine import TransitionReport
from megatron_rl.roles.actor import Actor
from megatron_rl.sampling.driver import Driver
from megatron_rl.sampling.replica_states import ReplicaSlot, State
from megatron_rl.sampling.request_queue import RequestQueue

Call = Callable[[ReplicaSlot], Future[Any]]
MAX_CONNECT_TRIES = 3
"""Number of tries to connect in which no replica was lost, before the run fails."""


class ReplicaCalls:
    """Calls of some replicas, made in the driver's thread."""

    def __init__(self, driver: Driver, slots: Sequence[ReplicaSlot], call: Call) -> None:
        self._driver = driver
        self._answers: dict[int, Any] = {}
        # Asking the thread takes a moment, and there are mostly no slots to call.
        self._called = driver.ask(lambda: self._begin(slots, call)) if slots else []

    def get(self) -> dict[int, Any]:
        """Wait for all: replica -> reply, without the replicas that were lost."""
        self._driver.wait_until(self._is_over)
        return self._answers

    def _begin(self, slots: Sequence[ReplicaSlot], call: Call) -> list[tuple[ReplicaSlot, int]]:
        called = [slot for slot in slots if slot.is_present]
        before = [(slot, slot.replica.num_restarts) for slot in called]
        for slot in called:
            self._driver.call(slot, call, partial(self._note, slot))
        return before

    def _note(self, slot: ReplicaSlot, answer: Any) -> None:
        self._answers[slot.number] = answer

    def _is_over(self) -> bool:
        return all(
            slot.number in self._answers or not slot.is_present or slot.replica.num_restarts > before
            for slot, before in self._called
        )


def restarts_of(slots: Sequence[ReplicaSlot]) -> dict[int, int]:
    """Replica -> number of its restarts so far."""
    return {slot.number: slot.replica.num_restarts for slot in slots}


class ReplicaWeights:
    """Sends the actor's weights to the rollout replicas, and reconnects after a replica joins or dies.

    version: last version that every generating replica has received. second_buffer: replicas have a second buffer, so
    that slices run while weights arrive. They then receive without being called.
    """

    def __init__(self, actor: Actor, driver: Driver, second_buffer: bool, version: int) -> None:
        self.version = version
        self._actor, self._driver, self._second_buffer = actor, driver, second_buffer
        self._connected: dict[int, int] = {}  # replica -> its restarts at that time

    @property
    def is_wanted(self) -> bool:
        """Whether a started replica waits for weights."""
        return bool(self._driver.slots.joining)

    def open(self) -> None:
        """Wait until every replica has an engine or is given up, then connect."""
        driver = self._driver
        driver.wait_until(lambda: not any(slot.state is State.STARTING for slot in driver.slots.all))
        self.connect()

    def connect(self) -> None:
        """Connect the actor and all present replicas; replicas keep the weights that they generate with.

        Raises WorkerFailure if they cannot connect although no replica was lost.
        """
        reasons: list[str] = []
        while len(reasons) < MAX_CONNECT_TRIES:
            num_lost = self._driver.slots.num_lost
            reason = self._connect_once()
            if not reason:
                return
            reasons = [] if self._driver.slots.num_lost > num_lost else [*reasons, reason]
        reason = f"actor and replicas cannot meet, tried {MAX_CONNECT_TRIES} times: {reasons[-1]}"
        raise WorkerFailure(reason, is_loss=True)

    def _connect_once(self) -> str:
        """Try once; return why it failed, or ""."""
        self._connected = {}
        # The others would wait for a replica that has just died.
        self._driver.ask(self._driver.check_replicas)
        with self._paused() as slots:
            restarts, first = restarts_of(slots), 0
            address = self._actor.offer_transfer(sum(slot.num_ranks for slot in slots)).get()
            addresses = {}
            for slot in slots:
                addresses[slot.number] = replace(address, first_receiver=first)
                first += slot.num_ranks
            joining = self._actor.join_transfer(address)
            joined = ReplicaCalls(
                self._driver, slots, lambda slot: slot.rollout.join_transfer(addresses[slot.number])
            ).get()
            answers = [*joining.get(), *(answer for of_ranks in joined.values() for answer in of_ranks)]
        missing = [slot.replica.name for slot in slots if slot.number not in joined]
        reasons = [*(answer for answer in answers if answer), *(f"{name} was lost" for name in missing)]
        if not reasons:
            self._connected = restarts
        return reasons[0] if reasons else ""

    @contextmanager
    def _paused(self) -> Iterator[list[ReplicaSlot]]:
        """Wait until no slice runs and start none inside; yields the present replicas, at least one."""
        driver = self._driver

        def set_paused(is_paused: bool) -> None:
            with driver.locked():
                for slot in driver.slots.all:
                    slot.is_paused = is_paused

        set_paused(True)
        try:
            driver.wait_until(
                lambda: bool(driver.slots.present) and not any(slot.is_busy for slot in driver.slots.generating)
            )
            yield driver.slots.present
        finally:
            set_paused(False)

    def send(self, version: int, queue: RequestQueue) -> Sequence[TransitionReport]:
        """Send the actor's current weights, those after step `version`, to all replicas; returns the ranks' reports.

        Joining replicas receive them too and generate from then on.
        """
        with self._driver.sending():
            reports = self._send(version, queue)
            self.version = version
            self._let_joining_generate(queue)
        return reports

    def _send(self, version: int, queue: RequestQueue) -> Sequence[TransitionReport]:
        while True:
            present = self._driver.slots.present
            if not present:
                self._driver.wait_until(lambda: self.is_wanted)
                continue
            with self._driver.locked():
                # A replica that connects again forgets weights that it has received but not taken.
                queue.scheduler.sending(version)
                # A running slice must take the weights that it names before they are overwritten.
                generating = self._driver.slots.generating
                in_use = {slot.number: slot.last_version for slot in generating if slot.last_version is not None}
            if restarts_of(present) != self._connected:
                self.connect()
                continue
            reports = self._transfer(version, present, in_use)
            if reports is not None:
                return reports

    def _transfer(
        self, version: int, slots: Sequence[ReplicaSlot], in_use: dict[int, int]
    ) -> Sequence[TransitionReport] | None:
        """Try one transfer; returns the ranks' reports, or None if a rank was lost and it must be tried again."""
        if self._second_buffer:
            first, *others = self._actor.try_send_weights(version, in_use).get()
            reports, is_broken = first.concluded, any(attempt.broken for attempt in (first, *others))
        else:
            with self._driver.holding(version):
                receiving = ReplicaCalls(self._driver, slots, lambda slot: slot.rollout.try_receive_weights())
                sent = self._actor.try_send_weights(version).get()
                received = receiving.get()
            arrivals = [arrival for of_ranks in received.values() for arrival in of_ranks]
            reports = [arrival.transition for arrival in arrivals if arrival.transition is not None]
            is_broken = len(received) < len(slots) or any(attempt.broken for attempt in (*sent, *arrivals))
        if is_broken:
            self._connected = {}
            return None
        return reports

    def _let_joining_generate(self, queue: RequestQueue) -> None:
        joined = [slot for slot in self._driver.slots.joining if restarts_of([slot]).items() <= self._connected.items()]
        ReplicaCalls(self._driver, joined, lambda slot: slot.rollout.enter()).get()
        with self._driver.locked():
            for slot in joined:
                if slot.state is State.JOINING:
                    slot.state = State.GENERATING
                    if slot.replica.num_restarts > 0:
                        queue.scheduler.replica_back(slot.number, self.version)
