"""A run on a simulated clock, decided by the very code that decides real ones: how long would it take, and why?

Turns answers' lengths and seconds (`Costs`) into seconds per step, idle shares, staleness and a timeline. It draws no
tokens and knows no model, so what reward or memory a setting costs is not its subject.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

from megatron_rl.sampling.engine_model import Costs, Engine, draw
from megatron_rl.sampling.rules import Decides, Order, Rules

Lengths = Callable[[int, int], int]
"""(request, attempt) -> tokens of its answer, at least 1."""


@dataclass(frozen=True)
class Failure:
    """A replica dies at `at` seconds and lives again `down` seconds later. None: never."""

    replica: int
    at: float
    down: float | None


@dataclass(frozen=True)
class SimulatedInterval:
    """One bar of a timeline. lane: "trainer", "weights" or "replica 0". what: "step 3", "version 2", "down"."""

    lane: str
    start: float
    stop: float
    what: str


@dataclass
class SimulatedRun:
    """What a simulated run came to. Times are seconds since its beginning.

    steps: when each training step ended. staleness: steps -> trained tokens. answers: request -> (version, tokens)
    runs of its trained answer. orders: replica -> answered orders, in order, with steps taken.
    """

    total: float = 0.0
    steps: list[float] = field(default_factory=list)
    intervals: list[SimulatedInterval] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)
    answers: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    orders: dict[int, list[tuple[Order, int]]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def seconds_per_step(self, skip: int = 0) -> float:
        """Mean, without the first `skip` steps, in which nothing has been drawn ahead yet."""
        start = self.steps[skip - 1] if skip else 0.0
        return (self.steps[-1] - start) / (len(self.steps) - skip)

    def idle_share(self, lane: str, skip: int = 0) -> float:
        """The share of the time until the last step in which a lane had nothing to do; being dead is not idleness."""
        start, stop = (self.steps[skip - 1] if skip else 0.0), self.steps[-1]
        bars = (bar for bar in self.intervals if bar.lane == lane)
        busy = sum(max(0.0, min(bar.stop, stop) - max(bar.start, start)) for bar in bars)
        return 1.0 - busy / (stop - start)


class StuckError(RuntimeError):
    """Nothing can happen any more, and the run is not over."""


class Simulation:
    """The executor on a simulated clock. It owns how many tokens each request has, and under which versions."""

    def __init__(
        self, decides: Decides, rules: Rules, num_replicas: int, lengths: Lengths, costs: Costs, saves: Collection[int]
    ) -> None:
        """saves: steps after which a checkpoint is written."""
        self.decides, self.rules, self.lengths, self.costs = decides, rules, lengths, costs
        self.saves = saves
        self.engines: list[Engine | None] = [Engine(rules.first_step - 1) for _ in range(num_replicas)]
        self.outcome = SimulatedRun(orders={replica: [] for replica in range(num_replicas)})
        self.now = 0.0
        self.step = rules.first_step - 1
        self.version = rules.first_step - 1
        self.tokens: dict[int, list[tuple[int, int]]] = {}
        self.attempts: Counter[int] = Counter()
        self.phase = "wait"
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._returning: list[int] = []
        self._sending = False

    def run(self, failures: Sequence[Failure]) -> SimulatedRun:
        """Until the last step is trained. Raises StuckError, and ValueError for orders that no engine can follow."""
        for failure in failures:
            self._after(failure.at, partial(self._fail, failure))
        while self.phase != "over":
            self.advance()
        self.outcome.total = self.now
        self.outcome.counts = dict(self.decides.counts)
        return self.outcome

    def advance(self) -> None:
        """Begin whatever can begin now, then let the next thing end. Raises as `run` does."""
        self.act_on_decisions()
        self._go_on()
        if self.phase == "over":
            return
        if not self._events:
            wanted = [self.decides.wanted_version(replica) for replica in range(len(self.engines))]
            raise StuckError(f"after step {self.step}, trainer: {self.phase}, versions wanted: {wanted}")
        self.now, _, happen = heappop(self._events)
        happen()

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        self._num_events += 1
        heappush(self._events, (self.now + seconds, self._num_events, happen))

    def _bar(self, lane: str, start: float, stop: float, what: str) -> None:
        self.outcome.intervals.append(SimulatedInterval(lane, start, stop, what))

    def _go_on(self) -> None:
        """Whatever can begin now begins: replicas first, then the trainer."""
        for replica, engine in enumerate(self.engines):
            order = self.decides.next_order(replica) if engine is not None else None
            if engine is not None and order is not None:
                self._begin_slice(replica, engine, order)
        if self.phase == "save" and self.decides.may_save(self.step):
            json.dumps(self.decides.state_dict())
            self.decides.saved(self.step)
            self._send_or_wait()
        if self.phase == "send" and not self._sending and self.decides.may_send(self.step):
            self._send()
        if self.phase == "wait":
            if self.step == self.rules.num_steps_total:
                self.phase = "over"
            elif self.decides.is_complete(self.step + 1):
                self._train()

    # Replicas

    def _begin_slice(self, replica: int, engine: Engine, order: Order) -> None:
        swaps = engine.follow(order, self.rules.colocated)
        given = sum(num for request in order.starts for _, num in self.tokens.get(request, ()))
        remaining = {request: self._remaining(request) for request in sorted(engine.requests)}
        drawing = draw(remaining, order.num_steps, self.rules.max_running)
        seconds = self.costs.slice_seconds(drawing.stretches) + given * self.costs.prefill_seconds
        seconds += self.costs.overhead_seconds + swaps * self.costs.swap_seconds

        def finish() -> None:
            if self.engines[replica] is not engine:
                return  # it died in this slice
            engine.requests.difference_update(drawing.finished)
            for request, num in drawing.drawn.items():
                self.tokens.setdefault(request, []).append((order.version, num))
            for request in drawing.finished:
                self._answer(request)
            self._bar(f"replica {replica}", start, self.now, f"version {order.version}")
            self.outcome.orders[replica].append((order, drawing.num_steps))
            self.decides.slice_done(replica, drawing.num_steps, drawing.drawn, drawing.finished)

        start = self.now
        self._after(seconds, finish)

    def _remaining(self, request: int) -> int:
        drawn = sum(num for _, num in self.tokens.get(request, ()))
        return self.lengths(request, self.attempts[request]) - drawn

    def _answer(self, request: int) -> None:
        if request in self.outcome.answers:
            raise ValueError(f"request {request} is finished a second time")
        self.outcome.answers[request] = self.tokens.pop(request)

    def act_on_decisions(self) -> None:
        """Truncate answers and forget tokens as was decided since the last call."""
        for decision in self.decides.take_decisions():
            if decision.kind == "truncate":
                self._answer(decision.request)
            else:
                self.tokens.pop(decision.request, None)
                self.attempts[decision.request] = decision.attempt

    def _fail(self, failure: Failure) -> None:
        if self.engines[failure.replica] is None or failure.replica in self._returning:
            return
        self.engines[failure.replica] = None
        self.decides.replica_lost(failure.replica)
        if failure.down is not None:
            self._bar(f"replica {failure.replica}", self.now, self.now + failure.down, "down")
            self._after(failure.down, partial(self._return, failure.replica))

    def _return(self, replica: int) -> None:
        """It gets the newest version; one whose transfer is under way is waited for, so that no replica misses it."""
        if self._sending:
            self._returning.append(replica)
            return
        self.engines[replica] = Engine(self.version)
        self.decides.replica_back(replica, self.version)

    # Trainer

    def _train(self) -> None:
        self.step += 1
        self.decides.step_taken(self.step)
        for request in self.rules.requests_of(self.step):
            for version, num in self.outcome.answers[request]:
                self.outcome.staleness[self.step - 1 - version] += num
        self.phase = "train"
        self._bar("trainer", self.now, self.now + self.costs.train_seconds, f"step {self.step}")
        self._after(self.costs.train_seconds, self._trained)

    def _trained(self) -> None:
        self.outcome.steps.append(self.now)
        if self.step in self.saves:
            self.phase = "save"
        else:
            self._send_or_wait()

    def _send_or_wait(self) -> None:
        self.phase = "send" if self.rules.sends(self.step) else "wait"

    def _send(self) -> None:
        """The trainer stands still for the exposed part; replicas draw on until it is their turn to swap."""
        self._sending = True
        self.phase = "exposed"
        self.decides.sending(self.step)
        self._fill_buffers(None)
        self._bar("weights", self.now, self.now + self.costs.transfer_seconds, f"version {self.step}")
        self._after(self.costs.exposed_seconds, self._let_train)
        self._after(self.costs.transfer_seconds, partial(self._sent, self.step))

    def _fill_buffers(self, version: int | None) -> None:
        for engine in self.engines:
            if engine is not None:
                engine.received = version

    def _let_train(self) -> None:
        self.phase = "wait"

    def _sent(self, version: int) -> None:
        self._sending = False
        self.version = version
        self._fill_buffers(version)
        self.decides.version_ready(version)
        returning, self._returning = self._returning, []
        for replica in returning:
            self._return(replica)


def simulate(
    decides: Decides,
    rules: Rules,
    num_replicas: int,
    lengths: Lengths,
    costs: Costs,
    *,
    failures: Sequence[Failure] = (),
    saves: Collection[int] = (),
) -> SimulatedRun:
    """A whole run. decides: for example Scheduler(rules, num_replicas). lengths: of answers, at least 1 token.

    saves: steps after which a checkpoint is written, which takes no time here but restarts what is unfinished. Raises
    StuckError where nothing goes on, as when all replicas are dead for ever.
    """
    return Simulation(decides, rules, num_replicas, lengths, costs, saves).run(failures)
