"""What running ahead saves, and what the controller costs: real driver and replicas, roles that sleep.

    python scripts/bench/async_step.py [--rounds 3] [--steps 14] [--json FILE]

ahead: half of the ranks train, the others are replicas that the driver's thread leads through slices. all ranks: all of
them generate, then all of them train, called directly; so twice the replicas, half the training seconds, and a sixth of
the transfer's. in turns: the split of `ahead`, the same driver, nothing drawn ahead. Answers are long-tailed (one in 32
is 8 times longer) or short and equal.

The arms take turns within one run; seconds of a step are medians over the rounds, with the lowest and the highest. What
else the machine does can only add to them. optimum: below which no schedule can come on these ranks
(`sampling.simulate`); simulated: what the scheduler comes to on a clock where the controller costs nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from sleeping_roles import SleepingActor, SleepingHost, SleepingRollout, Sleeps

from megatron_rl.cluster.local_launcher import LocalLauncher
from megatron_rl.cluster.pool_options import Hosting
from megatron_rl.cluster.process_cluster import ProcessCluster
from megatron_rl.cluster.waiting import get_all
from megatron_rl.config.roles import ACTOR, ROLLOUT, PoolSize, PoolSpec
from megatron_rl.records import Batch, Sampling, ragged
from megatron_rl.rollout.slices import Slice, SliceReport
from megatron_rl.sampling.driver import Driver
from megatron_rl.sampling.engine_model import Costs
from megatron_rl.sampling.in_flight import InFlightBatches
from megatron_rl.sampling.journal import Journal, Recorder
from megatron_rl.sampling.replica_states import ReplicaSlots
from megatron_rl.sampling.request_queue import RequestQueue
from megatron_rl.sampling.schedule_types import ScheduleConfig
from megatron_rl.sampling.scheduler import Scheduler
from megatron_rl.sampling.simulate import Lengths, optimum, simulate
from megatron_rl.sampling.weight_sync import ReplicaWeights

REPLICAS = 2
SLEEPS = Sleeps(step_s=0.004, transfer_s=0.03, max_running=16)
TRAIN_SHARE = 0.9
"""Training seconds, of those of drawing at the optimum: a trainer needs room for what transfers cost it."""
BALANCED_SHARE = 0.94
"""The share at which training, with one transfer, takes as long as drawing: neither side waits."""
FIRST, LAST = 3, 3
"""Steps at either end that are not measured: nothing is drawn ahead yet, or nothing is left to be drawn."""
SAMPLING = Sampling(1.0, 1.0, -1, 1 << 20, 0)


@dataclass(frozen=True)
class Shape:
    """Answers, and the rules of drawing them. costs: of replicas that have half of the ranks, and of the trainer."""

    name: str
    lengths: Lengths
    rules: ScheduleConfig
    train_share: float = TRAIN_SHARE

    @property
    def costs(self) -> Costs:
        costs = Costs(lambda running: SLEEPS.step_s, 0.0, SLEEPS.transfer_s, SLEEPS.transfer_s)
        return replace(costs, train_seconds=self.train_share * optimum(self.rules, REPLICAS, self.lengths, costs))

    @property
    def optimum_s(self) -> float:
        return optimum(self.rules, REPLICAS, self.lengths, self.costs)

    @property
    def simulated_s(self) -> float:
        scheduler = Scheduler(self.rules, REPLICAS)
        outcome = simulate(scheduler, self.rules, REPLICAS, self.lengths, self.costs)
        return mean_step(outcome.steps)


@cache
def long_tailed(request: int, attempt: int) -> int:
    """About 100 tokens; one in 32 answers is 8 times longer."""
    length = round(Random(f"{request} {attempt}").uniform(75, 125))
    return length * 8 if request % 32 == 7 else length


def shapes(num_steps: int) -> list[Shape]:
    """Slices of 128 ms, about 15 in a step, for long-tailed answers, and of 256 ms, 2 in a step, for equal ones."""
    rules = ScheduleConfig(128, num_steps, 3, slice_steps=32, max_running=SLEEPS.max_running, max_queued=8)
    running = SLEEPS.max_running
    equal = replace(rules, batch_rows=8 * REPLICAS * running, slice_steps=64, max_queued=3 * running)
    return [
        Shape("long-tailed", long_tailed, rules),
        Shape("equal", lambda request, attempt: 16, equal, BALANCED_SHARE),
    ]


def mean_step(ends: list[float]) -> float:
    """Seconds of a step, of those in the middle. ends: when each step ended."""
    return (ends[-1 - LAST] - ends[FIRST - 1]) / (len(ends) - FIRST - LAST)


@contextmanager
def sleeping_cluster() -> Iterator[ProcessCluster]:
    """A trainer of one rank, and twice as many replicas as `ahead` uses."""

    def spec(role: str, kind: type, num_ranks: int) -> PoolSpec:
        return PoolSpec(role, PoolSize(1, num_ranks, f"{role}.nodes", f"{role}.ranks"), (named(role),))

    def named(role: str) -> Any:
        return SimpleNamespace(name=role, phases={})

    kinds = {ACTOR: SleepingActor, ROLLOUT: SleepingRollout}
    hosting = Hosting(SleepingHost, (SLEEPS,), kinds, "cpu", {ROLLOUT: 1}, env={"OMP_NUM_THREADS": "1"})
    specs = [spec(ROLLOUT, SleepingRollout, 2 * REPLICAS), spec(ACTOR, SleepingActor, 1)]
    with ProcessCluster(LocalLauncher("cpu"), specs, hosting) as cluster:
        yield cluster


def batch(shape: Shape, step: int) -> Batch:
    """The prompts of a step: of one token, which is the answer's length."""
    requests = shape.rules.requests_of(step)
    rows = torch.arange(len(requests))
    lengths = [torch.tensor([shape.lengths(request, 0)]) for request in requests]
    texts = [""] * len(requests)
    told: dict[str, list[Any]] = {"data_source": texts, "ground_truth": texts, "extra_info": [{} for _ in texts]}
    return Batch(index=rows, sample=rows, input_ids=ragged(lengths), uid=rows, **told)


@dataclass
class Measured:
    """One run of an arm. ends: of steps. sending: seconds of the main thread for each transfer. reports: of slices."""

    ends: list[float]
    sending: list[float]
    reports: list[SliceReport]


def drawn_ahead(cluster: ProcessCluster, shape: Shape, folder: Path) -> Measured:
    """Steps as `ReplicaSampler` and the loop around it do them."""
    rules, costs, measured = shape.rules, shape.costs, Measured([], [], [])
    answers = InFlightBatches(rules.batch_rows, lambda *place: 0)
    actor: Any = cluster.pools[ACTOR].handle(ACTOR, SleepingActor)
    with ExitStack() as opened:
        journal = Journal(folder / "schedule.jsonl")
        opened.callback(journal.close)
        queue = RequestQueue(Recorder(Scheduler(rules, REPLICAS), journal), answers, REPLICAS)
        slots = ReplicaSlots(cluster.replicated[ROLLOUT].replicas[:REPLICAS], 0, print)
        driver = opened.enter_context(Driver(slots, queue, lambda: None))
        weights = ReplicaWeights(actor, driver, True, 0)
        not_begun = deque(range(1, rules.num_steps_total + 1))

        def announce() -> None:
            with driver.locked():
                while not_begun and not_begun[0] <= rules.last_batch(weights.version):
                    step = not_begun.popleft()
                    answers.add(step, batch(shape, step), SAMPLING, None, SAMPLING)
                queue.scheduler.version_ready(weights.version)

        weights.open()
        weights.send(0, queue)
        announce()
        for step in range(1, rules.num_steps_total + 1):
            driver.wait_until(lambda step=step: queue.scheduler.is_complete(step))
            with driver.locked():
                queue.batch(step)
            actor.train(costs.train_seconds).get()
            driver.wait_until(lambda step=step: queue.scheduler.may_send(step))
            start = time.monotonic()
            weights.send(step, queue)
            measured.sending.append(time.monotonic() - start)
            announce()
            measured.ends.append(time.monotonic())
        measured.reports = queue.reports
    return measured


def on_all_ranks(cluster: ProcessCluster, shape: Shape, num_steps: int) -> float:
    """Mean seconds of a step. All ranks draw a batch in equal chunks, then all train it; prompts and answers become
    records as they do in the other arms.
    """
    replicas = cluster.replicated[ROLLOUT].replicas
    rollouts = [replica.handle(ROLLOUT, SleepingRollout) for replica in replicas]
    actor: Any = cluster.pools[ACTOR].handle(ACTOR, SleepingActor)
    get_all([replica.host(SleepingHost).build(ROLLOUT) for replica in replicas])
    size = shape.rules.batch_rows // len(replicas)
    answers = InFlightBatches(shape.rules.batch_rows, lambda *place: 0)
    start = time.monotonic()
    for step in range(FIRST + 1, FIRST + 1 + num_steps):  # the same batches as of the other arms
        answers.add(step, batch(shape, step), SAMPLING, None, SAMPLING)
        starts = [answers.start(request) for request in shape.rules.requests_of(step)]
        parts = [tuple(starts[size * number : size * (number + 1)]) for number in range(len(replicas))]
        slices = [{number: Slice(step - 1, None, part)} for number, part in enumerate(parts)]
        drawing = [rollout.advance(one) for rollout, one in zip(rollouts, slices, strict=True)]
        get_all(drawing)
        for report in (report for future in drawing for report in future.get()):
            answers.extend(report.drawn, step - 1)
        answers.batch(step)
        actor.train(shape.costs.train_seconds / 2 + SLEEPS.transfer_s / 6).get()
    return (time.monotonic() - start) / num_steps


def in_turns(cluster: ProcessCluster, shape: Shape, folder: Path, num_steps: int) -> float:
    """Mean seconds of a step of the same split without anything drawn ahead, not counting the first."""
    rules = replace(shape.rules, ahead=0, num_steps_total=num_steps)
    ends = drawn_ahead(cluster, replace(shape, rules=rules), folder).ends
    return (ends[-1] - ends[0]) / (num_steps - 1)


@dataclass(frozen=True)
class Figures:
    """Seconds of a step, of each round."""

    ahead: list[float]
    all_ranks: list[float]
    in_turns: list[float]
    sending: list[float]


def measure(cluster: ProcessCluster, shape: Shape, rounds: int, num_synchronous: int, turns: bool = True) -> Figures:
    """All arms in turn, so many times. num_synchronous: steps of the arms that need no warming up."""
    found = Figures([], [], [], [])

    def ahead(folder: Path) -> None:
        measured = drawn_ahead(cluster, shape, folder)
        found.ahead.append(mean_step(measured.ends))
        found.sending.append(statistics.median(measured.sending))

    def synchronous(folder: Path) -> None:
        found.all_ranks.append(on_all_ranks(cluster, shape, num_synchronous))

    def split(folder: Path) -> None:
        found.in_turns.append(in_turns(cluster, shape, folder, num_synchronous + 1))

    arms: list[Callable[[Path], None]] = [ahead, synchronous, *([split] if turns else [])]
    for number in range(rounds):
        for arm in arms if number % 2 == 0 else arms[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                arm(Path(folder))
    return found


def spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=13, help="of the arm that runs ahead")
    parser.add_argument("--json", type=Path, help="write the medians there")
    options = parser.parse_args()
    said: dict[str, dict[str, float]] = {}
    with sleeping_cluster() as cluster:
        for shape in shapes(options.steps):
            found = measure(cluster, shape, options.rounds, 2, turns=shape.name == "equal")
            ahead, all_ranks = statistics.median(found.ahead), statistics.median(found.all_ranks)
            print(f"{shape.name} answers; training {shape.costs.train_seconds:.3f} s")
            print(f"  ahead      {spread(found.ahead)} s a step, {ahead / shape.optimum_s:.3f} of the optimum")
            print(f"  optimum    {shape.optimum_s:.3f}; simulated {shape.simulated_s:.3f}")
            print(f"  all ranks  {spread(found.all_ranks)}, {all_ranks / ahead:.2f} times as long as ahead")
            if found.in_turns:
                print(f"  in turns   {spread(found.in_turns)}, {statistics.median(found.in_turns) / ahead:.2f} times")
            print(f"  a transfer holds the trainer up for {spread(found.sending)}, {SLEEPS.transfer_s} of them sent")
            said[shape.name] = {"ahead_s": ahead, "optimum_s": shape.optimum_s, "all_ranks_s": all_ranks}
    if options.json:
        options.json.write_text(json.dumps(said, indent=1))


if __name__ == "__main__":
    main()
