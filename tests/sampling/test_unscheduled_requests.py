"""Prompts that are answered at once: which turns are drawn together, with answers that come when the test says so."""

from __future__ import annotations

import pytest
import torch
from test_samplers import Pairs

from megatron_rl.agents.episode import EpisodeLimits, Reply
from megatron_rl.agents.episodes import Episodes
from megatron_rl.agents.observation import Observation, Turn
from megatron_rl.images import ImagePiece
from megatron_rl.records import Sampling, repeated
from megatron_rl.rollout.slices import Drawn, SliceReport
from megatron_rl.sampling.unscheduled_requests import UnscheduledRequests

GOES_ON = Observation(({"role": "user", "content": "on"},))
ENDS = Observation((), 1.0, True)


class Arriving(Episodes):
    """Gives the answers of each group of requests together, in the order of `arrivals`."""

    def __init__(self, arrivals: list[list[tuple[int, Observation]]]) -> None:
        super().__init__(EpisodeLimits(5))
        self.arrivals, self.waiting = arrivals, set[int]()

    @property
    def is_open(self) -> bool:
        return bool(self.waiting)

    def submit(self, number, episode) -> None:
        self.waiting.add(number)

    def _begins(self, number, episode) -> bool:
        return False

    def _replies(self, waits):
        assert all(number in self.waiting for number, _ in self.arrivals[0])
        self.waiting -= {number for number, _ in self.arrivals[0]}
        return [(number, Reply(Turn("a"), answer, (7,))) for number, answer in self.arrivals.pop(0)]


def drawn(asked: UnscheduledRequests) -> list[int]:
    """Draw a turn of all that can be drawn on two replicas; returns their numbers."""
    numbers = [start.request for share in asked.shares(2) for start in share]
    asked.note([SliceReport(0, 0, 1, {number: Drawn((5,), (-0.5,), "stop") for number in numbers})])
    return numbers


@pytest.mark.parametrize("awaits", [False, True])
def test_a_late_answer_holds_up_its_own_row(awaits) -> None:
    """Four rows; the first has its answer last. An answer to a request of the schedule (9) is kept for it.

    Would not catch slices that last as long as the longest turn that they draw.
    """
    arrivals = [[(-2, GOES_ON), (-3, GOES_ON), (9, ENDS)], [(-4, ENDS)], [(-1, ENDS)], [(-2, ENDS), (-3, ENDS)]]
    episodes = Arriving(arrivals if awaits else [*arrivals[:2], arrivals[3], arrivals[2]])
    episodes.waiting.add(9)
    prompts = repeated(Pairs().batch(torch.tensor([0, 1])), 2)
    asked = UnscheduledRequests(prompts, Sampling(1.0, 1.0, -1, 8, 1), lambda *_: 0, episodes, awaits)
    asked.begin()
    assert drawn(asked) == [-1, -2, -3, -4]
    asked.take_replies(waits=False)
    assert [[start.request for start in share] for share in asked.shares(2)] == [[-2], [-3]]
    if not awaits:
        asked.take_replies(waits=True)  # that of row 4, which ends it
    assert drawn(asked) == [-2, -3] and not asked.is_answered
    asked.take_replies(waits=False)
    if not awaits:
        asked.take_replies(waits=True)
    assert asked.is_answered and [number for number, _ in episodes.take()] == [9]


def test_a_reply_whose_images_nobody_has_read_holds_up_its_own_row() -> None:
    """Two rows; the images of the first are read after the second has ended. Would not catch features of other images:
    they are taken by digest.
    """
    piece = ImagePiece(0, "ab" * 16, (1, 2, 2), 1)
    episodes = Arriving([[(-1, GOES_ON), (-2, ENDS)]])
    episodes._replies = lambda waits: [
        (number, Reply(Turn("a"), answer, (7,), images=(piece,) if answer is GOES_ON else ()))
        for number, answer in episodes.arrivals.pop(0)
    ]
    asked = UnscheduledRequests(
        Pairs().batch(torch.tensor([0, 1])), Sampling(1.0, 1.0, -1, 8, 1), lambda *_: 0, episodes
    )
    known: set[str] = set()
    asked.has_features = lambda pieces: {piece.digest for piece in pieces} <= known
    assert drawn(asked) == [-1, -2]
    asked.take_replies(waits=True)
    assert drawn(asked) == [] and [piece.digest for (piece,) in asked.unread] == [piece.digest]
    known.add(piece.digest)
    (start,) = asked.shares(1)[0]
    assert start.request == -1 and asked.unread == [] and not asked.is_answered
    assert asked.images == [(piece._replace(first=len(start.token_ids) - 1),)]
