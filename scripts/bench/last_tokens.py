"""What late groups and an order of requests save: the real schedule and queue, replicas that sleep.

    python scripts/bench/last_tokens.py [--rounds 5] [--steps 10] [--json FILE]

Two replicas with 16 places each draw batches of 16 prompts with 8 samples, one after the other; nothing is trained
between them. Every sixteenth prompt has answers five times as long as the others; prompts come again in every epoch of
four steps, and lengths differ by up to a fifth from sample to sample and from epoch to epoch.

by number: a batch in one round. longest first: the same with rollout.longest_first. ahead: rollout_ahead=1 with partial
rollouts, batch by batch. late groups: rollout_ahead=2 with over_sample_rate=0.2. both: late groups, longest first.

The arms take turns within one run; seconds of a step after the first epoch are medians over the rounds, with the lowest
and the highest; engine steps, those of the slower replica, do not depend on the machine. least: the tokens of those
steps over all places, below which no order can come.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from async_step import SAMPLING, SLEEPS, sleeping_cluster, spread
from sleeping_roles import SleepingHost, SleepingRollout

from megatron_rl.cluster.process_cluster import ProcessCluster
from megatron_rl.cluster.replicas import Replica
from megatron_rl.cluster.waiting import get_all
from megatron_rl.config.roles import ROLLOUT
from megatron_rl.config.rollout_keys import extra_groups
from megatron_rl.records import Batch, ragged
from megatron_rl.rollout.slices import Slice
from megatron_rl.sampling.in_flight import InFlightBatches
from megatron_rl.sampling.request_queue import RequestQueue
from megatron_rl.sampling.response_history import LengthHistory
from megatron_rl.sampling.schedule_types import ScheduleConfig
from megatron_rl.sampling.scheduler import Scheduler

REPLICAS, PROMPTS, SAMPLES, EPOCH = 2, 16, 8, 4
ROWS = PROMPTS * SAMPLES
RATE = 0.2
ARMS = ("by number", "longest first", "ahead", "late groups", "both")


def length(step: int, prompt: int, sample: int) -> int:
    """Tokens of an answer."""
    typical = Random(f"prompt {prompt}").uniform(75, 125) * (5 if prompt % 16 == 11 else 1)
    return round(typical * Random(f"{step} {prompt} {sample}").uniform(0.8, 1.2))


def prompts_of(step: int) -> Sequence[int]:
    """Numbers of a step's prompts, in the order of its epoch."""
    epoch, place = divmod(step - 1, EPOCH)
    order = Random(f"epoch {epoch}").sample(range(EPOCH * PROMPTS), EPOCH * PROMPTS)
    return order[place * PROMPTS : (place + 1) * PROMPTS]


def batch(step: int) -> Batch:
    """The prompts of a step: of one token, which is the answer's length."""
    rows = [(prompt, sample) for prompt in prompts_of(step) for sample in range(SAMPLES)]
    index, sample = (torch.tensor(column) for column in zip(*rows, strict=True))
    lengths = [torch.tensor([length(step, *row)]) for row in rows]
    texts = [""] * len(rows)
    groups = torch.arange(PROMPTS).repeat_interleave(SAMPLES)
    told: dict[str, list[Any]] = {"data_source": texts, "ground_truth": texts, "extra_info": [{} for _ in texts]}
    return Batch(index=index, sample=sample, input_ids=ragged(lengths), uid=groups, **told)


def rules_of(arm: str, num_steps: int) -> ScheduleConfig:
    """The rules of an arm."""
    if arm in ("by number", "longest first"):
        return ScheduleConfig(ROWS, num_steps, ahead=0, slice_steps=None, group_size=SAMPLES)
    pool = ScheduleConfig(
        *(ROWS, num_steps),
        slice_steps=16,
        max_running=SLEEPS.max_running,
        max_queued=ROWS,
        deterministic=True,
        colocated=True,
    )
    if arm == "ahead":
        return pool
    return ScheduleConfig(
        **{**vars(pool), "ahead": 2, "extra_groups": extra_groups(PROMPTS, RATE), "group_size": SAMPLES}
    )


def draw_steps(replicas: Sequence[Replica], arm: str, num_steps: int) -> tuple[float, float]:
    """Mean seconds and engine steps of a step after the first epoch, as `PoolSampler` does them."""
    rules = rules_of(arm, num_steps)
    get_all([replica.host(SleepingHost).build(ROLLOUT) for replica in replicas])
    rollouts = [replica.handle(ROLLOUT, SleepingRollout) for replica in replicas]
    lengths, last, ends = LengthHistory(rules), 0, [time.monotonic()]
    engine_steps: list[int] = []
    is_ordered = arm in ("longest first", "both")
    scheduler = Scheduler(rules, REPLICAS, None, lengths.expected if is_ordered else None)
    answers = InFlightBatches(rules.batch_rows, lambda *place: 0, groups=scheduler.groups)
    lengths.prompt_of = lambda request: answers.episode(request).row["index"]
    lengths.batch_of = scheduler.groups.batch_of
    queue = RequestQueue(scheduler, answers, REPLICAS)
    queue.lengths = lengths if is_ordered else None
    for step in range(1, num_steps + 1):
        while last < rules.last_batch(step - 1):
            last += 1
            answers.add(last, batch(last), SAMPLING, None, SAMPLING)
        queue.scheduler.version_ready(step - 1)
        engine_steps.append(0)
        while not queue.scheduler.is_complete(step):
            orders = [(number, queue.next_slice(number)) for number in range(REPLICAS)]
            drawing = [rollouts[number].advance({number: order}) for number, order in orders if order is not None]
            reports = [report for future in drawing for report in future.get()]
            engine_steps[-1] += max(report.num_steps for report in reports)
            for report in reports:
                queue.done(report)
        drops = [Slice(step - 1, 0, drops=tuple(sorted(engine))) for engine in queue.engines]
        get_all([rollouts[number].advance({number: order}) for number, order in enumerate(drops)])
        for engine in queue.engines:
            engine.clear()
        rows, _ = queue.batch(step)
        lengths.add(step, rows["index"], rows)
        ends.append(time.monotonic())
    measured = num_steps - 1 - EPOCH
    return (ends[-2] - ends[EPOCH]) / measured, sum(engine_steps[EPOCH:-1]) / measured


def least_seconds(num_steps: int) -> float:
    """Mean seconds of the same steps if no place were ever empty."""
    steps = range(EPOCH + 1, num_steps)
    tokens = sum(int(batch(step).flat("input_ids").sum()) for step in steps)
    return tokens / len(steps) / (REPLICAS * SLEEPS.max_running) * SLEEPS.step_s


def measure(cluster: ProcessCluster, rounds: int, num_steps: int) -> dict[str, list[tuple[float, float]]]:
    """All arms in turn, so many times: arm -> seconds and engine steps of a step."""
    replicas, found = (
        cluster.replicated[ROLLOUT].replicas[:REPLICAS],
        {arm: list[tuple[float, float]]() for arm in ARMS},
    )
    for number in range(rounds):
        for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
            found[arm].append(draw_steps(replicas, arm, num_steps))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the medians there")
    options = parser.parse_args()
    with sleeping_cluster() as cluster:
        found = measure(cluster, options.rounds, options.steps)
    base, least = statistics.median(seconds for seconds, _ in found["by number"]), least_seconds(options.steps)
    print(f"{'least':14} {least:.3f} s a step, {least / SLEEPS.step_s:.0f} engine steps")
    for arm, rounds in found.items():
        seconds, engine_steps = [seconds for seconds, _ in rounds], {steps for _, steps in rounds}
        print(
            f"{arm:14} {spread(seconds)} s a step, {base / statistics.median(seconds):.2f} times as fast; "
            f"engine steps {', '.join(f'{steps:.1f}' for steps in engine_steps)}"
        )
    if options.json:
        medians = {arm: statistics.median(seconds for seconds, _ in rounds) for arm, rounds in found.items()}
        options.json.write_text(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
