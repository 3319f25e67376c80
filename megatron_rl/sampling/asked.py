"""Answer prompts at once, beside the schedule: for a validation, a filter of groups, a greedy baseline."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from megatron_rl.agents.episode import rows_of
from megatron_rl.agents.episodes import Episodes
from megatron_rl.cluster.routing import chunk_sizes
from megatron_rl.records import Batch, Prompts, Sampling
from megatron_rl.rollout.slices import Slice, SliceReport, Start
from megatron_rl.sampling.driver import Driver, advance
from megatron_rl.sampling.open_answers import SeedOf, begun_prompts, new_episodes, start_of


class Asked:
    """One request per row of prompts, numbered -1, -2, ...; the schedule's requests are numbered from 0 on.

    Turns of all rows are drawn together, and then answered together.
    """

    def __init__(self, prompts: Prompts, sampling: Sampling, seed_of: SeedOf, episodes: Episodes | None) -> None:
        """episodes: answers turns; None: the first turn is the last."""
        self._rows = {-1 - row: episode for row, episode in enumerate(new_episodes(prompts, sampling))}
        self._prompts, self._seed_of, self._episodes = prompts, seed_of, episodes

    def begin(self) -> None:
        """Have environments begin their episodes; call it before all others, in the thread of `note`."""
        if self._episodes is not None:
            self._episodes.begin(self._rows)

    @property
    def is_answered(self) -> bool:
        return all(episode.finish for episode in self._rows.values())

    def shares(self, num_replicas: int) -> list[tuple[Start, ...]]:
        """The unanswered requests in contiguous shares, one for each replica; the first ones have one more."""
        waiting = [
            start_of(request, episode, self._seed_of) for request, episode in self._rows.items() if not episode.finish
        ]
        shares, first = [], 0
        for size in chunk_sizes(len(waiting), num_replicas):
            shares.append(tuple(waiting[first : first + size]))
            first += size
        return shares

    def note(self, reports: Iterable[SliceReport]) -> None:
        """Take the turns of slices that ran until nothing was left, and have them answered."""
        for report in reports:
            for request, new in report.drawn.items():
                self._rows[request].extend(new, report.version, self._episodes is not None)
        waiting = {request: episode for request, episode in self._rows.items() if episode.waits}
        if self._episodes is not None and waiting:
            for request, reply in self._episodes.play(waiting):
                waiting[request].take(reply, self._episodes.limits)

    def rows(self) -> tuple[Prompts, Batch]:
        """Prompts as their episodes have begun, and their answers."""
        episodes = list(self._rows.values())
        return begun_prompts(self._prompts, episodes), rows_of(
            episodes, with_versions=False, has_turns=self._episodes is not None
        )


def ask_replicas(driver: Driver, asked: Asked, version: int) -> bool:
    """Have replicas answer with the weights of `version`; call it in the driver's thread while the driver is held.

    Unfinished requests in the engines are dropped. If a replica is lost, the others take its rows. Returns whether all
    are answered: False if no replica is left.
    """
    while not asked.is_answered:
        slots = driver.slots.generating
        if not slots:
            return False
        for slot, share in zip(slots, asked.shares(len(slots)), strict=True):
            engine = driver.backlog.engines[slot.number]
            drops = tuple(sorted(engine))
            engine.clear()
            if share or drops:
                order = Slice(version, None if share else 0, share, drops)
                driver.call(slot, partial(advance, order), asked.note)
        while driver.has_calls:
            driver.collect(timeout=1.0)
    return True
