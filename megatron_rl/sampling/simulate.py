"""Simulate an asynchronous run on a simulated clock with the scheduler of real runs; and two references for it.

Lengths of responses and seconds (`Costs`) give seconds per step, idle shares, staleness and a timeline. The simulation
has no tokens and no model, so it says nothing about rewards or memory. References: seconds of the same work done
synchronously, and a lower bound.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

from megatron_rl.sampling.engine_model import Costs, Engine, draw
from megatron_rl.sampling.request_scheduler import RequestScheduler
from megatron_rl.sampling.schedule_types import ScheduleConfig, SliceOrder, Verdict

Lengths = Callable[[int, int], int]
"""(request, attempt) -> tokens of its response, at least 1."""


Judge = Callable[[int], tuple[Verdict, float]]
"""group -> the verdict on it, and seconds until it is scored."""

Turns = Callable[[int], tuple[int, float]]
"""request -> tokens of each of its turns, and seconds from a turn's end to its reply."""


@dataclass(frozen=True)
class Failure:
    """A replica dies at `at` seconds and restarts `down` seconds later. None: never."""

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
    """The result of a simulation. Times are seconds since its beginning.

    steps: end of each training step. staleness: steps -> number of trained tokens. batches: step -> its requests.
    trained: step -> its groups. answers: request -> (version, number of tokens) of each part of its trained response.
    orders: replica -> its finished orders with their engine steps.
    """

    total: float = 0.0
    steps: list[float] = field(default_factory=list)
    intervals: list[SimulatedInterval] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)
    batches: dict[int, list[int]] = field(default_factory=dict)
    answers: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    orders: dict[int, list[tuple[SliceOrder, int]]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    trained: dict[int, list[int]] = field(default_factory=dict)

    def idle_share(self, lane: str, start: float, stop: float) -> float:
        """The share of an interval in which a lane had nothing to do; a dead replica does not count as idle."""
        bars = (bar for bar in self.intervals if bar.lane == lane)
        busy = sum(max(0.0, min(bar.stop, stop) - max(bar.start, start)) for bar in bars)
        return 1.0 - busy / (stop - start)


class StuckError(RuntimeError):
    """The run is not over, but nothing can happen any more."""


class Simulation:
    """The executor on a simulated clock. It counts the tokens of each request by version."""

    def __init__(
        self,
        scheduler: RequestScheduler,
        rules: ScheduleConfig,
        num_replicas: int,
        lengths: Lengths,
        costs: Costs,
        saves: Collection[int],
        turns: Turns | None = None,
        judge: Judge | None = None,
    ) -> None:
        """saves: steps after which a checkpoint is written. turns: see `Turns`; None: each response is a single turn.
        judge: its verdicts, with `ScheduleConfig.kept_groups`.
        """
        self.scheduler, self.rules, self.lengths, self.costs = scheduler, rules, lengths, costs
        self.saves, self.turns = saves, turns
        self._judging = judge, set[int]()
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
        self._away: dict[int, int] = {}
        self._sending = False

    def run(self, failures: Sequence[Failure]) -> SimulatedRun:
        """Run until the last step is trained. Raises StuckError, and ValueError for orders that no engine can
        follow.
        """
        for failure in failures:
            self._after(failure.at, partial(self._fail, failure))
        while self.phase != "over":
            self.advance()
        self.outcome.total = self.now
        self.outcome.counts = dict(self.scheduler.counts)
        return self.outcome

    def advance(self) -> None:
        """Begin all that can begin now, then let the next event happen. Raises as `run` does."""
        self.act_on_decisions()
        self._go_on()
        if self.phase == "over":
            return
        if not self._events:
            wanted = [self.scheduler.wanted_version(replica) for replica in range(len(self.engines))]
            raise StuckError(f"after step {self.step}, trainer: {self.phase}, versions wanted: {wanted}")
        self.now, _, happen = heappop(self._events)
        happen()

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        self._num_events += 1
        heappush(self._events, (self.now + seconds, self._num_events, happen))

    def _bar(self, lane: str, start: float, stop: float, what: str) -> None:
        self.outcome.intervals.append(SimulatedInterval(lane, start, stop, what))

    def _go_on(self) -> None:
        """Begin all that can begin now: replicas first, then the trainer."""
        judge, begun = self._judging
        for group in sorted(set(self.scheduler.verdicts.unjudged) - begun):
            assert judge is not None  # else there are no verdicts
            verdict, seconds = judge(group)
            begun.add(group)
            self._after(seconds, partial(self.scheduler.verdicts.judged, group, verdict))
        for replica, engine in enumerate(self.engines):
            self.scheduler.verdicts.open_groups()
            order = self.scheduler.next_order(replica) if engine is not None else None
            if engine is not None and order is not None:
                self._begin_slice(replica, engine, order)
        self.scheduler.verdicts.take_joined()
        if self.phase == "save" and self.scheduler.may_save(self.step):
            json.dumps(self.scheduler.state_dict())
            self.scheduler.saved(self.step)
            self._send_or_wait()
        if self.phase == "send" and not self._sending and self.scheduler.may_send(self.step):
            self._send()
        if self.phase == "wait":
            if self.step == self.rules.num_steps_total:
                self.phase = "over"
            elif self.scheduler.is_complete(self.step + 1):
                self._train()

    # Replicas

    def _begin_slice(self, replica: int, engine: Engine, order: SliceOrder) -> None:
        swaps = engine.follow(order, self.rules.colocated)
        given = sum(num for request in order.starts for _, num in self.tokens.get(request, ()))
        remaining = {request: self._left_in_turn(request) for request in sorted(engine.requests)}
        drawing = draw(remaining, order.num_steps, self.rules.max_running)
        seconds = self.costs.slice_seconds(drawing.stretches) + given * self.costs.prefill_seconds
        seconds += self.costs.overhead_seconds + swaps * self.costs.swap_seconds

        def finish() -> None:
            if self.engines[replica] is not engine:
                return  # it died in this slice
            engine.requests.difference_update(drawing.finished)
            for request, num in drawing.drawn.items():
                self.tokens.setdefault(request, []).append((order.version, num))
            ended, left = (drawing.finished, []) if self.turns is None else ([], drawing.finished)
            for request in ended:
                self._answer(request)
            for request in left:
                self.leave(request)
            self._bar(f"replica {replica}", start, self.now, f"version {order.version}")
            self.outcome.orders[replica].append((order, drawing.num_steps))
            self.scheduler.slice_done(replica, drawing.num_steps, drawing.drawn, ended, left)

        start = self.now
        self._after(seconds, finish)

    def _drawn(self, request: int) -> int:
        return sum(num for _, num in self.tokens.get(request, ()))

    def _remaining(self, request: int) -> int:
        return self.lengths(request, self.attempts[request]) - self._drawn(request)

    def _left_in_turn(self, request: int) -> int:
        """Tokens until the end of the present turn."""
        remaining = self._remaining(request)
        if self.turns is None:
            return remaining
        each, _ = self.turns(request)
        return min(remaining, each - self._drawn(request) % each)

    def leave(self, request: int) -> None:
        """A turn of a request has ended; its reply comes later."""
        assert self.turns is not None  # else no turn ends
        self._away[request] = self._num_events
        self._after(self.turns(request)[1], partial(self._come_back, request, self._num_events))

    def _come_back(self, request: int, number: int) -> None:
        if self._away.get(request) != number:
            return  # its tokens were dropped meanwhile
        del self._away[request]
        is_finished = self._remaining(request) == 0
        if is_finished:
            self._answer(request)
        self.scheduler.returned(request, is_finished)

    def _answer(self, request: int) -> None:
        if request in self.outcome.answers:
            raise ValueError(f"request {request} is finished a second time")
        self.outcome.answers[request] = self.tokens.pop(request)

    def act_on_decisions(self) -> None:
        """Truncate responses and drop tokens as decided since the last call."""
        for decision in self.scheduler.take_decisions():
            if decision.kind == "truncate":
                self._answer(decision.request)
            else:
                self.tokens.pop(decision.request, None)
                self._away.pop(decision.request, None)
                self.attempts[decision.request] = decision.attempt

    def _fail(self, failure: Failure) -> None:
        if self.engines[failure.replica] is None or failure.replica in self._returning:
            return
        self.engines[failure.replica] = None
        self.scheduler.replica_lost(failure.replica)
        if failure.down is not None:
            self._bar(f"replica {failure.replica}", self.now, self.now + failure.down, "down")
            self._after(failure.down, partial(self._return, failure.replica))

    def _return(self, replica: int) -> None:
        """Restart with the newest version, after a running transfer, so that the replica does not miss it."""
        if self._sending:
            self._returning.append(replica)
            return
        self.engines[replica] = Engine(self.version)
        self.scheduler.replica_back(replica, self.version)

    # Trainer

    def _train(self) -> None:
        self.step += 1
        self.scheduler.step_taken(self.step)
        self.outcome.batches[self.step] = self.scheduler.groups.requests_of(self.step)
        self.outcome.trained[self.step] = self.scheduler.groups.of(self.step)
        for request in self.outcome.batches[self.step]:
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
        """Send weights: the trainer is blocked for the exposed part; replicas generate until their next swap."""
        self._sending = True
        self.phase = "exposed"
        self.scheduler.sending(self.step)
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
        self.scheduler.version_ready(version)
        returning, self._returning = self._returning, []
        for replica in returning:
            self._return(replica)


def simulate(
    scheduler: RequestScheduler,
    rules: ScheduleConfig,
    num_replicas: int,
    lengths: Lengths,
    costs: Costs,
    *,
    failures: Sequence[Failure] = (),
    saves: Collection[int] = (),
    turns: Turns | None = None,
    judge: Judge | None = None,
) -> SimulatedRun:
    """Simulate a whole run. scheduler: for example Scheduler(rules, num_replicas). lengths: of responses, at least 1
    token.

    saves: steps after which a checkpoint is written; it takes no time here but restarts unfinished requests. turns: of
    every response. judge: see `Simulation`. Raises StuckError if the run cannot continue, for example
    because all replicas are dead.
    """
    return Simulation(scheduler, rules, num_replicas, lengths, costs, saves, turns, judge).run(failures)


def synchronous(rules: ScheduleConfig, num_replicas: int, lengths: Lengths, costs: Costs) -> float:
    """Mean seconds of a step that generates its batch, trains it and sends weights, one after the other on all ranks.

    num_replicas and costs.train_seconds are those of all ranks together: more replicas and fewer seconds than in a run
    with two pools on the same ranks. Each batch is split into equal chunks, as a synchronous run does.
    """
    steps = range(rules.first_step, rules.num_steps_total + 1)
    seconds = [_draw_seconds(rules, num_replicas, lengths, costs, step) for step in steps]
    return sum(seconds) / len(seconds) + costs.train_seconds + costs.transfer_seconds


def _draw_seconds(rules: ScheduleConfig, num_replicas: int, lengths: Lengths, costs: Costs, step: int) -> float:
    """Seconds until the slowest replica has finished its chunk of batch `step`."""
    requests = rules.requests_of(step)
    smaller, num_larger = divmod(rules.batch_rows, num_replicas)
    slowest, start = 0.0, requests.start
    for replica in range(num_replicas):
        stop = start + smaller + (replica < num_larger)
        chunk = {request: lengths(request, 0) for request in range(start, stop)}
        slowest = max(slowest, costs.slice_seconds(draw(chunk, None, rules.max_running).stretches))
        start = stop
    return slowest + costs.overhead_seconds


def optimum(rules: ScheduleConfig, num_replicas: int, lengths: Lengths, costs: Costs) -> float:
    """A lower bound of an asynchronous run's mean seconds per step: what the busier side needs if it never waits.

    The rollout side generates all tokens at the best rate that an engine reaches with as many running requests as
    `ahead` and `max_running` allow. Failures, swaps and prefills are left out; they only add to it.
    """
    steps = range(rules.first_step, rules.num_steps_total + 1)
    num_tokens = sum(lengths(request, 0) for step in steps for request in rules.requests_of(step)) / len(steps)
    most = min(rules.max_running, -(-(rules.ahead + 1) * rules.batch_rows // num_replicas))
    token_seconds = min(costs.step_seconds(running) / running for running in range(1, most + 1))
    return max(costs.train_seconds + costs.exposed_seconds, num_tokens * token_seconds / num_replicas)
