"""Orders become slices, and reports become facts."""

from __future__ import annotations

import pytest
from test_in_flight import GREEDILY, SAMPLING, prompts, seed_of

from megatron_rl.agents.episode import EpisodeLimits, Reply
from megatron_rl.agents.episodes import RecordedEpisodes
from megatron_rl.agents.observation import EpisodeFailure, Observation, Turn
from megatron_rl.rollout.slices import Drawn, SliceReport
from megatron_rl.sampling.in_flight import InFlightBatches
from megatron_rl.sampling.request_queue import RequestQueue
from megatron_rl.sampling.schedule_types import ScheduleConfig
from megatron_rl.sampling.scheduler import Scheduler


def test_a_slice_that_was_not_begun_is_not_taken_for_one_that_was() -> None:
    """Its requests would never be drawn. Would not catch weights that are wrong."""
    queue = RequestQueue(
        Scheduler(ScheduleConfig(batch_rows=1, num_steps_total=1), 1), InFlightBatches(1, lambda *_: 0), 1
    )
    with pytest.raises(RuntimeError, match="replica 0 did not receive announced weights: the sender left"):
        queue.done(SliceReport(0, 0, 0, broken="the sender left"))


ASKS, LOST = Observation(({"role": "user", "content": "?"},)), EpisodeFailure("crashed", "why")
GRADED = Observation((), 0.5, True)


@pytest.mark.parametrize(
    ("turns", "finish", "reward"),
    [
        ([Reply(Turn("a", num_tokens=2, is_cut=True), GRADED)], "length", 0.5),
        ([Reply(Turn("a", num_tokens=2), ASKS, (7,)), Reply(Turn("", is_cut=True), GRADED)], "length", 0.5),
        ([Reply(Turn("a", num_tokens=2, is_cut=True), LOST)], "failed", 0.0),
        ([], "length", 0.0),
    ],
    ids=["in its turn", "before its turn", "fails", "is not told"],
)
def test_a_straggler_has_its_grade(turns: list[Reply], finish: str, reward: float) -> None:
    """By hand: request 1 is late for a slice, and its environment hears of it. A failure is not drawn again, as the
    batch is complete. Would not catch an agent that gives none; test_agent_runs.py does.
    """
    rules = ScheduleConfig(2, 1, slice_steps=2, max_running=2, straggler_policy="truncate", straggler_slices=1)
    replies = [(0, Reply(Turn("b", num_tokens=2), GRADED)), *((1, reply) for reply in turns)]
    episodes = RecordedEpisodes(EpisodeLimits(5, max_retries=3), replies)
    answers = InFlightBatches(2, seed_of, limits=episodes.limits, hears_cut=episodes.hears_cut)
    answers.add(1, prompts([1], [2]), SAMPLING, None, GREEDILY)
    queue, two, is_asked = RequestQueue(Scheduler(rules, 1), answers, 1, episodes), (-0.5, -0.5), len(turns) == 2
    queue.next_slice(0)
    drawn = {0: Drawn((5, 6), two, "stop"), 1: Drawn((8, 9), two, "stop" if is_asked else "")}
    queue.done(SliceReport(0, 0, 2, drawn))
    while not queue.scheduler.is_complete(1):
        queue.take_replies()
        if queue.next_slice(0) is not None:
            queue.done(SliceReport(0, 0, 2, {}))
    late = answers.episode(1)
    assert (late.finish, late.reward, late.waits, late.attempt) == (finish, reward, False, 0)
    assert not episodes.is_open and (late.failure is None) == (finish == "length")
