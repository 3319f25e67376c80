"""The main thread's side of the weights' way to replicas: send, and build the way anew when replicas come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_rl.config.roles import ROLLOUT
from megatron_rl.dispatch import Future
from megatron_rl.generation.driver import Driver
from megatron_rl.generation.lanes import Lane, State
from megatron_rl.generation.work import Work
from megatron_rl.hybrid_engine.engine import TransitionReport
from megatron_rl.roles.actor import Actor

Call = Callable[[Lane], Future[Any]]


class ReplicaBridge:
    """version: of the newest weights that all living replicas have received.

    beside: replicas have a second buffer, so that slices go on while weights come.
    """

    def __init__(self, actor: Actor, driver: Driver, beside: bool, version: int) -> None:
        self.version = version
        self._actor, self._driver, self._beside = actor, driver, beside
        self._met: set[int] = set()

    @property
    def is_wanted(self) -> bool:
        """Whether a replica that has started waits for weights."""
        return bool(self._driver.lanes.joining)

    def connect(self) -> None:
        """Have all ranks meet: replicas that draw keep their weights, the others build their engines meanwhile."""
        lanes = self._present()
        address = self._actor.offer_bridge(sum(lane.num_ranks for lane in lanes)).get()
        joining, first = self._actor.join_bridge(address), 0
        addresses = {}
        for lane in lanes:
            addresses[lane.number] = replace(
                address, first_receiver=first, first_replica=lane.number, second_buffer=self._beside
            )
            first += lane.num_ranks

        def meet(lane: Lane) -> Future[Any]:
            own = addresses[lane.number]
            return lane.rollout.rejoin_bridge(own) if lane.is_built else lane.host.build(ROLLOUT, own)

        self._ask_all(lanes, meet)
        joining.get()
        for lane in lanes:
            lane.is_built = True
        self._met = {lane.number for lane in lanes}

    def send(self, version: int, work: Work) -> list[TransitionReport]:
        """Bring the actor's present weights, those after step `version`, to all replicas; what it cost each rank.

        Replicas that have started again are among them and draw from then on.
        """
        while True:
            present = self._present()
            if {lane.number for lane in present} != self._met or not all(lane.is_built for lane in present):
                self.connect()
                present = self._present()
            answers = self._move(version, present)
            if answers is not None:
                break
        self.version = version
        self._let_joined_draw(work)
        return [report for reports in answers.values() for report in reports]

    def _present(self) -> list[Lane]:
        return [lane for lane in self._driver.lanes.all if lane.state in (State.LIVES, State.JOINS)]

    def _move(self, version: int, lanes: Sequence[Lane]) -> dict[int, list[TransitionReport]] | None:
        """One transfer: lane -> reports of its ranks; None where a rank was lost and it must be tried again."""
        if self._beside:
            self._ask_all(lanes, lambda lane: lane.rollout.begin_receive())
            sent = self._actor.send_weights(version).get()
            answers = self._ask_all(lanes, lambda lane: lane.rollout.end_receive())
        else:
            with self._driver.holding(version):
                sending = self._actor.send_weights(version)
                answers = self._ask_all(lanes, lambda lane: lane.rollout.receive_weights())
                sent = sending.get()
        is_whole = len(answers) == len(lanes) and not any(getattr(report, "broken", "") for report in sent)
        if not is_whole:
            self._met = set()  # the way is broken: all meet anew
        return answers if is_whole else None

    def _let_joined_draw(self, work: Work) -> None:
        joined = self._driver.lanes.joining
        self._ask_all(joined, lambda lane: lane.rollout.enter())
        with self._driver.locked():
            for lane in joined:
                if lane.state is State.JOINS:
                    lane.state = State.LIVES
                    if lane.was_lost:
                        work.decider.replica_back(lane.number, self.version)

    def _ask_all(self, lanes: Sequence[Lane], call: Call) -> dict[int, Any]:
        """Call replicas in the driver's thread and wait for all of them: lane -> answer, of those that are not lost."""
        answers: dict[int, Any] = {}
        asked: set[int] = set()

        def begin() -> None:
            for lane in lanes:
                if lane.state in (State.LIVES, State.JOINS):
                    asked.add(lane.number)
                    self._driver.expect(lane, call(lane), partial(answers.__setitem__, lane.number))

        self._driver.ask(begin)
        by_number = {lane.number: lane for lane in lanes}
        lost = (State.STARTS, State.GONE)
        self._driver.wait_until(lambda: all(number in answers or by_number[number].state in lost for number in asked))
        return answers
