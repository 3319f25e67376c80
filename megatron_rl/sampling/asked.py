"""Answer prompts at once, beside the schedule: for a validation, a filter of groups, a greedy baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from megatron_rl.cluster.routing import chunk_sizes
from megatron_rl.records import Batch, Prompts, Sampling
from megatron_rl.rollout.slices import Drawn, Slice, SliceReport, Start
from megatron_rl.sampling.driver import Driver, advance
from megatron_rl.sampling.open_answers import OpenAnswer, rows_of_answers


class Asked:
    """One request per row of prompts, numbered -1, -2, ...; the schedule's requests are numbered from 0 on.

    seed_of: (salt, prompt index, sample) -> seed.
    """

    def __init__(self, prompts: Prompts, sampling: Sampling, seed_of: Callable[[int, int, int], int]) -> None:
        places = zip(prompts.index.tolist(), prompts.sample.tolist(), prompts.prompt_ids.unbind(), strict=True)
        self._starts = [
            Start(-1 - row, tuple(ids.tolist()), seed_of(sampling.salt, index, sample), sampling.max_tokens, sampling)
            for row, (index, sample, ids) in enumerate(places)
        ]
        self._drawn: dict[int, Drawn] = {}

    @property
    def is_answered(self) -> bool:
        return len(self._drawn) == len(self._starts)

    def shares(self, num_replicas: int) -> list[tuple[Start, ...]]:
        """The unanswered requests in contiguous shares, one for each replica; the first ones have one more."""
        waiting = [start for start in self._starts if start.request not in self._drawn]
        shares, first = [], 0
        for size in chunk_sizes(len(waiting), num_replicas):
            shares.append(tuple(waiting[first : first + size]))
            first += size
        return shares

    def note(self, reports: Iterable[SliceReport]) -> None:
        """Take the answers of slices that ran until nothing was left."""
        for report in reports:
            self._drawn.update(report.drawn)

    def rows(self) -> Batch:
        """Prompts with their answers. Raises KeyError while one is missing."""
        drawn = [(start, self._drawn[start.request]) for start in self._starts]
        return rows_of_answers(
            [
                OpenAnswer(
                    start.token_ids,
                    index=0,
                    sample=0,
                    sampling=start.sampling,
                    token_ids=list(new.token_ids),
                    log_probs=list(new.log_probs),
                    finish=new.finish,
                    experts=new.experts,
                )
                for start, new in drawn
            ],
            with_versions=False,
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
