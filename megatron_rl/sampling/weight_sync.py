"""The main thread's side of the weights' way to replicas: send, and build the way anew when replicas come and go."""

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
from megatron_rl.sampling.backlog import Backlog
from megatron_rl.sampling.driver import Driver
from megatron_rl.sampling.replica_states import ReplicaSlot, State

Call = Callable[[ReplicaSlot], Future[Any]]
MOST_MEETINGS = 3
"""Tries to meet of which none has lost a replica."""


class Asked:
    """Calls of some replicas, made in the driver's thread."""

    def __init__(self, driver: Driver, slots: Sequence[ReplicaSlot], call: Call) -> None:
        self._driver = driver
        self._answers: dict[int, Any] = {}
        # The thread takes a moment to answer, and mostly no replica has started again.
        self._lanes = driver.ask(lambda: self._begin(slots, call)) if slots else []

    def get(self) -> dict[int, Any]:
        """Wait for all: lane -> answer, of those that are not lost meanwhile."""
        self._driver.wait_until(self._is_over)
        return self._answers

    def _begin(self, slots: Sequence[ReplicaSlot], call: Call) -> list[tuple[ReplicaSlot, int]]:
        asked = [slot for slot in slots if slot.is_present]
        before = [(slot, slot.replica.num_restarts) for slot in asked]
        for slot in asked:
            self._driver.call(slot, call, partial(self._note, slot))
        return before

    def _note(self, slot: ReplicaSlot, answer: Any) -> None:
        self._answers[slot.number] = answer

    def _is_over(self) -> bool:
        return all(
            slot.number in self._answers or not slot.is_present or slot.replica.num_restarts > before
            for slot, before in self._lanes
        )


def lives_of(slots: Sequence[ReplicaSlot]) -> dict[int, int]:
    """Replica -> restarts before its present life."""
    return {slot.number: slot.replica.num_restarts for slot in slots}


class ReplicaWeights:
    """version: of the newest weights that all living replicas have received.

    beside: replicas have a second buffer, so that slices go on while weights come; they listen by themselves then.
    """

    def __init__(self, actor: Actor, driver: Driver, beside: bool, version: int) -> None:
        self.version = version
        self._actor, self._driver, self._beside = actor, driver, beside
        self._met: dict[int, int] = {}  # replica -> its restarts until then

    @property
    def is_wanted(self) -> bool:
        """Whether a replica that has started waits for weights."""
        return bool(self._driver.slots.joining)

    def open(self) -> None:
        """Wait for all replicas to have engines, or to be given up, and connect."""
        driver = self._driver
        driver.wait_until(lambda: not any(slot.state is State.STARTS for slot in driver.slots.all))
        self.connect()

    def connect(self) -> None:
        """Have all ranks meet, whoever is there; replicas keep the weights that they draw with.

        Raises WorkerFailure where they cannot though none of them is lost.
        """
        reasons: list[str] = []
        while len(reasons) < MOST_MEETINGS:
            num_lost = self._driver.slots.num_lost
            broken = self._meet()
            if not broken:
                return
            reasons = [] if self._driver.slots.num_lost > num_lost else [*reasons, broken]
        raise WorkerFailure(f"actor and replicas cannot meet, tried {MOST_MEETINGS} times: {reasons[-1]}")

    def _meet(self) -> str:
        """Try once; why it was not to be, or ""."""
        self._met = {}
        with self._idle() as slots:
            lives, first = lives_of(slots), 0
            address = self._actor.offer_bridge(sum(slot.num_ranks for slot in slots)).get()
            addresses = {}
            for slot in slots:
                addresses[slot.number] = replace(address, first_receiver=first)
                first += slot.num_ranks
            joining = self._actor.join_bridge(address)
            met = self._ask(slots, lambda slot: slot.rollout.join_bridge(addresses[slot.number])).get()
            answers = [*joining.get(), *(answer for of_ranks in met.values() for answer in of_ranks)]
        missing = [slot.replica.name for slot in slots if slot.number not in met]
        broken = [*(answer for answer in answers if answer), *(f"{name} was lost" for name in missing)]
        if not broken:
            self._met = lives
        return broken[0] if broken else ""

    @contextmanager
    def _idle(self) -> Iterator[list[ReplicaSlot]]:
        """The replicas that are there; no slice of theirs is under way inside."""
        driver = self._driver

        def set_meets(meets: bool) -> None:
            with driver.locked():
                for slot in driver.slots.all:
                    slot.meets = meets

        set_meets(True)
        try:
            driver.wait_until(
                lambda: bool(driver.slots.present) and not any(slot.is_busy for slot in driver.slots.living)
            )
            yield driver.slots.present
        finally:
            set_meets(False)

    def send(self, version: int, work: Backlog) -> Sequence[TransitionReport]:
        """Bring the actor's present weights, those after step `version`, to all replicas; what it cost each rank.

        Replicas that have started again are among them and draw from then on.
        """
        while True:
            present = self._driver.slots.present
            if not present:
                self._driver.wait_until(lambda: self.is_wanted)
                continue
            with self._driver.locked():
                # Whoever meets anew forgets weights that have come and were not taken.
                work.decider.sending(version)
                # Those that a slice under way names must be taken before they are overwritten.
                holding = {slot.number: slot.named for slot in self._driver.slots.living if slot.named is not None}
            if lives_of(present) != self._met:
                self.connect()
                continue
            reports = self._move(version, present, holding)
            if reports is not None:
                break
        self.version = version
        self._let_joined_draw(work)
        return reports

    def _move(
        self, version: int, slots: Sequence[ReplicaSlot], holding: dict[int, int]
    ) -> Sequence[TransitionReport] | None:
        """One transfer: what it cost each rank; None where a rank was lost and it must be tried again."""
        if self._beside:
            first, *others = self._actor.try_send_weights(version, holding).get()
            reports, is_broken = first.concluded, any(attempt.broken for attempt in (first, *others))
        else:
            with self._driver.holding(version):
                receiving = self._ask(slots, lambda slot: slot.rollout.try_receive_weights())
                sent = self._actor.try_send_weights(version).get()
                arrivals = receiving.get()
            came = [arrival for of_ranks in arrivals.values() for arrival in of_ranks]
            reports = [arrival.transition for arrival in came if arrival.transition is not None]
            is_broken = len(arrivals) < len(slots) or any(one.broken for one in (*sent, *came))
        if is_broken:
            self._met = {}  # the way is broken: all meet anew
            return None
        return reports

    def _let_joined_draw(self, work: Backlog) -> None:
        joined = [slot for slot in self._driver.slots.joining if lives_of([slot]).items() <= self._met.items()]
        self._ask(joined, lambda slot: slot.rollout.enter()).get()
        with self._driver.locked():
            for slot in joined:
                if slot.state is State.JOINS:
                    slot.state = State.LIVES
                    if slot.was_lost:
                        work.decider.replica_back(slot.number, self.version)

    def _ask(self, slots: Sequence[ReplicaSlot], call: Call) -> Asked:
        return Asked(self._driver, slots, call)
