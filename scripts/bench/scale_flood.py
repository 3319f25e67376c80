"""A flood of episodes through the driver: turns that an engine and an environment answer at once, so that its own work
is what is left: the schedule, orders, the queue, episodes, and a journal line for each fact.

    python scripts/bench/scale_flood.py [--episodes 1250 5000 20000] [--turns 20] [--away 0]

Printed: turns a CPU second, memory, bytes and lines of the journal a turn, and exponents over the number of episodes.
--away: turns that wait for their replies at a time, so that most episodes are open. No token is rendered or read:
templates and tokenizers cost the driver what `tests/agents` runs with, and their time is not in these figures.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from scale import MIB, exponents

from megatron_rl.agents.as_json import Answer
from megatron_rl.agents.environment_host import TurnJob
from megatron_rl.agents.episode import EpisodeLimits
from megatron_rl.agents.episodes import LiveEpisodes
from megatron_rl.agents.observation import Observation, Turn
from megatron_rl.records import Batch, Sampling, ragged
from megatron_rl.rollout.slices import FINISHED_BY_STOP, Drawn, Slice, SliceReport
from megatron_rl.sampling.in_flight import InFlightBatches
from megatron_rl.sampling.journal import Journal, Recorder, reply_event
from megatron_rl.sampling.request_queue import RequestQueue
from megatron_rl.sampling.schedule_types import ScheduleConfig
from megatron_rl.sampling.scheduler import Scheduler

GROUP_SIZE = 5
OBSERVATION = Observation(({"role": "user", "content": "go on"},), 0.25)
TOKENS = Drawn((5, 6), (-0.5, -0.25), FINISHED_BY_STOP)


class InstantEnvironments:
    """Answers every turn with one observation, as soon as more than `num_away` turns wait, or nothing else is left."""

    opens = hears_cuts = False

    def __init__(self, num_away: int) -> None:
        self._num_away = num_away
        self._waiting: deque[int] = deque()

    def play(self, number: int, job: TurnJob) -> None:
        self._waiting.append(number)

    def take(self, waits: bool) -> list[tuple[int, Answer]]:
        num = max(len(self._waiting) - self._num_away, 1 if waits else 0)
        return [(self._waiting.popleft(), OBSERVATION) for _ in range(min(num, len(self._waiting)))]

    def forget(self, episode: int) -> None:
        """Nothing is kept."""


def instant_episodes(num_turns: int, num_away: int) -> LiveEpisodes:
    """Return episodes whose turns are read and rendered at once."""
    reader: Any = SimpleNamespace(turn=lambda ids, tools: Turn("go"))
    renderer: Any = SimpleNamespace(following=lambda *turn: (7, 8))
    return LiveEpisodes(InstantEnvironments(num_away), renderer, reader, EpisodeLimits(num_turns))


def prompts(num: int) -> Batch:
    """Return as many prompts of eight tokens, of one group each GROUP_SIZE."""
    numbers = torch.arange(num)
    return Batch(
        input_ids=ragged([torch.arange(8)] * num),
        uid=numbers // GROUP_SIZE,
        index=numbers // GROUP_SIZE,
        sample=numbers % GROUP_SIZE,
        data_source=[""] * num,
        ground_truth=[""] * num,
        extra_info=[{}] * num,
    )


def flooded(num: int, num_turns: int, journal: Journal, num_away: int, num_replicas: int) -> RequestQueue:
    """Return a queue whose batch of `num` episodes is begun."""
    rules = ScheduleConfig(num, 1, has_turns=True, group_size=GROUP_SIZE)
    scheduler = Recorder(Scheduler(rules, num_replicas), journal)
    episodes = instant_episodes(num_turns, num_away)
    episodes.record = lambda request, reply: journal.append(reply_event(request, reply))
    answers = InFlightBatches(num, lambda *key: 1, limits=episodes.limits, groups=scheduler.groups)
    sampling = Sampling(1.0, 1.0, -1, 1 << 16, salt=1)
    answers.add(1, prompts(num), sampling, None, sampling)
    queue = RequestQueue(scheduler, answers, num_replicas, episodes)
    scheduler.version_ready(0)
    return queue


def report(replica: int, order: Slice, engine: set[int]) -> SliceReport:
    """Return what an engine that answers at once reports."""
    return SliceReport(replica, order.version, 1, dict.fromkeys(sorted(engine), TOKENS))


def play(queue: RequestQueue) -> None:
    """Run slices until the batch is complete."""
    while not queue.scheduler.is_complete(1):
        idle = True
        for replica, engine in enumerate(queue.engines):
            order = queue.next_slice(replica)
            if order is not None:
                queue.done(report(replica, order, engine))
                idle = False
        queue.take_replies(waits=idle)


def flood(num: int, num_turns: int, num_away: int = 0, num_replicas: int = 8) -> dict[str, float]:
    """Play a batch of episodes; return what it costs."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "schedule.jsonl"
        journal, driver = Journal(file), psutil.Process()
        queue, before = flooded(num, num_turns, journal, num_away, num_replicas), driver.memory_info().rss
        start = time.process_time()
        play(queue)
        cpu_s = time.process_time() - start
        grown = driver.memory_info().rss - before
        rows, _ = queue.batch(1)
        journal.close()
        assert bool((rows["environment_rewards"] == num_turns * OBSERVATION.reward).all())
        costs = {"episodes": num, "turns": num * num_turns, "cpu_s": cpu_s, "journal_bytes": file.stat().st_size}
        return costs | {"lines": journal.num_lines, "grown_mib": grown / MIB, "rss_mib": driver.memory_info().rss / MIB}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, nargs="+", default=[1250, 5000, 20000])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--away", type=float, default=0.0, help="share of the episodes")
    parser.add_argument("--replicas", type=int, default=8)
    options = parser.parse_args()
    rows = []
    for num in options.episodes:
        rows.append(row := flood(num, options.turns, int(options.away * num), options.replicas))
        print(
            f"{num} episodes: {row['turns'] / row['cpu_s']:.0f} turns a CPU second, {row['grown_mib']:.0f} MiB grown, "
            f"{row['rss_mib']:.0f} in all, journal {row['journal_bytes'] / row['turns']:.0f} bytes and "
            f"{row['lines'] / row['turns']:.2f} lines a turn",
            flush=True,
        )
    if len(rows) > 1:
        curves = exponents(rows, ("cpu_s", "journal_bytes", "grown_mib"), over="episodes")
        print("exponents:", {name: round(value, 2) for name, value in curves.items()})


if __name__ == "__main__":
    main()
