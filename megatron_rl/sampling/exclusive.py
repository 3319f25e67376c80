"""Answer one batch at once on all replicas, between two slices of everything else: for a validation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from megatron_rl.cluster.routing import chunk_sizes
from megatron_rl.records import Generations, Prompts, Sampling
from megatron_rl.rollout.slices import Drawn, Slice, SliceReport, Start
from megatron_rl.sampling.driver import Driver, advance
from megatron_rl.sampling.open_answers import OpenAnswer, generations
from megatron_rl.sampling.replica_states import ReplicaSlot


def generate_on(
    driver: Driver, prompts: Prompts, sampling: Sampling, version: int, seed_of: Callable[[int, int, int], int]
) -> Generations | None:
    """One answer per row with the weights of `version`; call it in the driver's thread while the driver is held.

    seed_of: (salt, prompt index, sample) -> seed. Unfinished requests in the engines are dropped. If a replica is lost,
    the other replicas take its rows. Returns None if no replica is left.
    """
    starts = _starts(prompts, sampling, seed_of)
    drawn: dict[int, Drawn] = {}

    def note(reports: Sequence[SliceReport]) -> None:
        for report in reports:
            drawn.update(report.drawn)

    while waiting := [start for start in starts if start.request not in drawn]:
        slots = driver.slots.generating
        if not slots:
            return None
        for slot, share in _shares(slots, waiting):
            engine = driver.backlog.engines[slot.number]
            drops = tuple(sorted(engine))
            engine.clear()
            if share or drops:
                driver.call(slot, partial(advance, Slice(version, None if share else 0, tuple(share), drops)), note)
        while driver.has_calls:
            driver.collect(timeout=1.0)
    return generations([_answer(start, drawn[start.request]) for start in starts])


def _starts(prompts: Prompts, sampling: Sampling, seed_of: Callable[[int, int, int], int]) -> list[Start]:
    """One request per row, numbered -1, -2, ...; training's requests are numbered from 0 on."""
    places = zip(prompts.index.tolist(), prompts.sample.tolist(), prompts.prompt_ids.unbind(), strict=True)
    return [
        Start(-1 - row, tuple(ids.tolist()), seed_of(sampling.salt, index, sample), sampling.max_tokens, sampling)
        for row, (index, sample, ids) in enumerate(places)
    ]


def _shares(slots: Sequence[ReplicaSlot], waiting: Sequence[Start]) -> list[tuple[ReplicaSlot, list[Start]]]:
    """Contiguous shares of the rows, as `routing.split_call` makes them."""
    shares, first = [], 0
    for slot, size in zip(slots, chunk_sizes(len(waiting), len(slots)), strict=True):
        shares.append((slot, list(waiting[first : first + size])))
        first += size
    return shares


def _answer(start: Start, drawn: Drawn) -> OpenAnswer:
    tokens, log_probs = list(drawn.token_ids), list(drawn.log_probs)
    return OpenAnswer(start.token_ids, 0, 0, start.sampling, tokens, log_probs, finish=drawn.finish)
