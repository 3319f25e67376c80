"""The main thread's side of the weights' way to replicas: send, and build the way anew when replicas come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_rl.dispatch import Future
from megatron_rl.errors import WorkerFailure
from megatron_rl.generation.driver import Driver
from megatron_rl.generation.lanes import Lane, State
from megatron_rl.generation.work import Work
from megatron_rl.hybrid_engine.engine import TransitionReport
from megatron_rl.roles.actor import Actor

Call = Callable[[Lane], Future[Any]]
MOST_MEETINGS = 3
"""Tries to meet of which none has lost a replica."""


class Asked:
    """Calls of some replicas, made in the driver's thread."""

    def __init__(self, driver: Driver, lanes: Sequence[Lane], call: Call) -> None:
        self._driver = driver
        self._answers: dict[int, Any] = {}
        # The thread takes a moment to answer, and mostly no replica has started again.
        self._lanes = driver.ask(lambda: self._begin(lanes, call)) if lanes else []

    def get(self) -> dict[int, Any]:
        """Wait for all: lane -> answer, of those that are not lost meanwhile."""
        self._driver.wait_until(self._is_over)
        return self._answers

    def _begin(self, lanes: Sequence[Lane], call: Call) -> list[tuple[Lane, int]]:
        asked = [lane for lane in lanes if lane.is_present]
        before = [(lane, lane.replica.num_restarts) for lane in asked]
        for lane in asked:
            self._driver.call(lane, call, partial(self._note, lane))
        return before

    def _note(self, lane: Lane, answer: Any) -> None:
        self._answers[lane.number] = answer

    def _is_over(self) -> bool:
        return all(
            lane.number in self._answers or not lane.is_present or lane.replica.num_restarts > before
            for lane, before in self._lanes
        )


def lives_of(lanes: Sequence[Lane]) -> dict[int, int]:
    """Replica -> restarts before its present life."""
    return {lane.number: lane.replica.num_restarts for lane in lanes}


class ReplicaBridge:
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
        return bool(self._driver.lanes.joining)

    def open(self) -> None:
        """Wait for all replicas to have engines, or to be given up, and connect."""
        driver = self._driver
        driver.wait_until(lambda: not any(lane.state is State.STARTS for lane in driver.lanes.all))
        self.connect()

    def connect(self) -> None:
        """Have all ranks meet, whoever is there; replicas keep the weights that they draw with.

        Raises WorkerFailure where they cannot though none of them is lost.
        """
        reasons: list[str] = []
        while len(reasons) < MOST_MEETINGS:
            num_lost = self._driver.lanes.num_lost
            broken = self._meet()
            if not broken:
                return
            reasons = [] if self._driver.lanes.num_lost > num_lost else [*reasons, broken]
        raise WorkerFailure(f"actor and replicas cannot meet, tried {MOST_MEETINGS} times: {reasons[-1]}")

    def _meet(self) -> str:
        """Try once; why it was not to be, or ""."""
        self._met = {}
        with self._idle() as lanes:
            lives, first = lives_of(lanes), 0
            address = self._actor.offer_bridge(sum(lane.num_ranks for lane in lanes)).get()
            addresses = {}
            for lane in lanes:
                addresses[lane.number] = replace(address, first_receiver=first)
                first += lane.num_ranks
            joining = self._actor.join_bridge(address)
            met = self._ask(lanes, lambda lane: lane.rollout.join_bridge(addresses[lane.number])).get()
            answers = [*joining.get(), *(answer for of_ranks in met.values() for answer in of_ranks)]
        missing = [lane.replica.name for lane in lanes if lane.number not in met]
        broken = [*(answer for answer in answers if answer), *(f"{name} was lost" for name in missing)]
        if not broken:
            self._met = lives
        return broken[0] if broken else ""

    @contextmanager
    def _idle(self) -> Iterator[list[Lane]]:
        """The replicas that are there; no slice of theirs is under way inside."""
        driver = self._driver

        def set_meets(meets: bool) -> None:
            with driver.locked():
                for lane in driver.lanes.all:
                    lane.meets = meets

        set_meets(True)
        try:
            driver.wait_until(
                lambda: bool(driver.lanes.present) and not any(lane.is_busy for lane in driver.lanes.living)
            )
            yield driver.lanes.present
        finally:
            set_meets(False)

    def send(self, version: int, work: Work) -> Sequence[TransitionReport]:
        """Bring the actor's present weights, those after step `version`, to all replicas; what it cost each rank.

        Replicas that have started again are among them and draw from then on.
        """
        while True:
            present = self._driver.lanes.present
            if not present:
                self._driver.wait_until(lambda: self.is_wanted)
                continue
            with self._driver.locked():
                # Whoever meets anew forgets weights that have come and were not taken.
                work.decider.sending(version)
                # Those that a slice under way names must be taken before they are overwritten.
                holding = {lane.number: lane.named for lane in self._driver.lanes.living if lane.named is not None}
            if lives_of(present) != self._met:
                self.connect()
                continue
            reports = self._move(version, present, holding)
            if reports is not None:
                break
        self.version = version
        self._let_joined_draw(work)
        return reports

    def _move(self, version: int, lanes: Sequence[Lane], holding: dict[int, int]) -> Sequence[TransitionReport] | None:
        """One transfer: what it cost each rank; None where a rank was lost and it must be tried again."""
        if self._beside:
            first, *others = self._actor.try_send_weights(version, holding).get()
            reports, is_broken = first.concluded, any(attempt.broken for attempt in (first, *others))
        else:
            with self._driver.holding(version):
                receiving = self._ask(lanes, lambda lane: lane.rollout.try_receive_weights())
                sent = self._actor.try_send_weights(version).get()
                arrivals = receiving.get()
            came = [arrival for of_ranks in arrivals.values() for arrival in of_ranks]
            reports = [arrival.transition for arrival in came if arrival.transition is not None]
            is_broken = len(arrivals) < len(lanes) or any(one.broken for one in (*sent, *came))
        if is_broken:
            self._met = {}  # the way is broken: all meet anew
            return None
        return reports

    def _let_joined_draw(self, work: Work) -> None:
        joined = [lane for lane in self._driver.lanes.joining if lives_of([lane]).items() <= self._met.items()]
        self._ask(joined, lambda lane: lane.rollout.enter()).get()
        with self._driver.locked():
            for lane in joined:
                if lane.state is State.JOINS:
                    lane.state = State.LIVES
                    if lane.was_lost:
                        work.decider.replica_back(lane.number, self.version)

    def _ask(self, lanes: Sequence[Lane], call: Call) -> Asked:
        return Asked(self._driver, lanes, call)
