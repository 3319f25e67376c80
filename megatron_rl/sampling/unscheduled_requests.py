"""Generate responses to prompts now, outside of the schedule: for a validation, a filter of groups, a greedy
baseline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from megatron_rl.agents.episode import Episode
from megatron_rl.agents.episodes import Episodes
from megatron_rl.cluster.routing import chunk_sizes
from megatron_rl.images import Pieces
from megatron_rl.records import Batch, Sampling
from megatron_rl.rollout.slices import Slice, SliceReport, Start
from megatron_rl.sampling.driver import Driver, advance
from megatron_rl.sampling.in_flight import ImagesOf, SeedOf, new_episodes, responses_of, start_of
from megatron_rl.sampling.questions import PolicyQuestions

UNREAD_S = 0.01
"""Time between two looks at whether another thread has read the images of requests."""


class UnscheduledRequests:
    """One request per row of prompts, numbered -1, -2, ...; the schedule's requests are numbered from 0 on.

    A slice generates turns until none is left to generate; an episode whose turn has its reply continues with the next
    slice.
    """

    def __init__(
        self,
        prompts: Batch,
        sampling: Sampling,
        seed_of: SeedOf,
        episodes: Episodes | None,
        awaits_turns: bool = False,
        earlier: Sequence[tuple[bytes, ...]] = (),
        images_of: ImagesOf = lambda pieces: (),
    ) -> None:
        """has_features: whether engines can be given these images; requests that show others wait.

        episodes: answers turns; None: the first turn is the last. awaits_turns: the next ones are generated when all
        have their replies. earlier: of each row, see `Start`; empty: of none.
        """
        self._images_of = images_of
        self.has_features: Callable[[Pieces], bool] = lambda pieces: True
        self._rows = {-1 - row: episode for row, episode in enumerate(new_episodes(prompts, sampling))}
        self._uid, self._seed_of = prompts["uid"], seed_of
        self._episodes, self._awaits_turns = episodes, awaits_turns
        self._earlier = dict(zip(self._rows, earlier, strict=False))
        self._away: set[int] = set()

    def begin(self) -> None:
        """Have environments begin their episodes; call it before all others, in the thread of `note`."""
        if self._episodes is not None:
            self._episodes.begin(self._rows)

    @property
    def is_answered(self) -> bool:
        return all(episode.finish for episode in self._rows.values())

    @property
    def episodes(self) -> list[Episode]:
        """One for each row of prompts."""
        return list(self._rows.values())

    def _is_ready(self, request: int, episode: Episode) -> bool:
        return not episode.finish and request not in self._away and self.has_features(episode.images or ())

    @property
    def unread(self) -> list[Pieces]:
        """The images of rows that wait for features."""
        return [pieces for pieces in self.images if not self.has_features(pieces)]

    @property
    def images(self) -> list[Pieces]:
        """The images of the rows that show some."""
        return [episode.images for episode in self._rows.values() if episode.images]

    def shares(self, num_replicas: int) -> list[tuple[Start, ...]]:
        """The requests that can be generated now, one share for each replica: of contiguous rows, the first ones of one
        more. A row stays with its replica, which may have keys and values of its earlier turns.
        """
        rows, shares, first = list(self._rows.items()), [], 0
        for size in chunk_sizes(len(rows), num_replicas):
            own = rows[first : first + size]
            ready = [(request, e) for request, e in own if self._is_ready(request, e)]
            shares.append(
                tuple(
                    start_of(request, e, self._seed_of, self._earlier.get(request, ()), self._images_of)
                    for request, e in ready
                )
            )
            first += size
        return shares

    def note(self, reports: Iterable[SliceReport]) -> None:
        """Take the turns of slices that ran until nothing was left, and have them answered."""
        for report in reports:
            for request, new in report.drawn.items():
                episode = self._rows[request]
                hears_cut = self._episodes is not None and self._episodes.hears_cut(request)
                episode.extend(new, report.version, self._episodes is not None, hears_cut)
                if self._episodes is not None and episode.waits:
                    self._away.add(request)
                    self._episodes.submit(request, episode)

    def take_replies(self, waits: bool) -> None:
        """Take the replies to turns that exist. waits: until there is one, if a turn waits for its reply."""
        is_open = bool(self._away)
        while is_open:
            assert self._episodes is not None
            for request, reply in self._episodes.take_of(self._away, waits or self._awaits_turns):
                episode, hears_cut = self._rows[request], self._episodes.hears_cut(request)
                episode.take(reply, self._episodes.limits, hears_cut)
                if episode.waits:  # it hears that it is over
                    self._episodes.submit(request, episode)
                else:
                    self._away.remove(request)
            is_open = self._awaits_turns and bool(self._away)

    def rows(self) -> Batch:
        """The prompts as their episodes have begun, with their responses."""
        return responses_of(self.episodes, self._uid, with_versions=False, has_turns=self._episodes is not None)


def generate_now(driver: Driver, asked: UnscheduledRequests | PolicyQuestions, version: int) -> bool:
    """Have replicas answer with the weights of `version`; call it in the driver's thread while the driver is held.

    Unfinished requests in the engines are dropped. If a replica is lost, the others take its rows. Returns whether all
    are answered: False if no replica is left.
    """
    while not asked.is_answered:
        slots = driver.slots.generating
        if not slots:
            return False
        is_idle = True
        for slot, share in zip(slots, asked.shares(len(slots)), strict=True):
            engine = driver.queue.engines[slot.number]
            drops = tuple(sorted(engine))
            engine.clear()
            if share or drops:
                order = Slice(version, None if share else 0, share, drops)
                driver.call(slot, partial(advance, order), asked.note)
                is_idle = False
        while driver.has_calls:
            driver.collect(timeout=1.0)
        if is_idle and asked.unread:
            time.sleep(UNREAD_S)
        asked.take_replies(waits=is_idle and not asked.unread)
    return True
