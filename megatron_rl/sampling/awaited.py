"""How far the responses are that a sampler waits for, as the driver knows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_rl.agents.episode import Episode


class Awaited:
    """The episodes that are waited for, if any. in_rounds: they are generated in several rounds of the engines, between
    which the driver learns of them; else only the engines know.
    """

    def __init__(self, in_rounds: bool) -> None:
        self._in_rounds = in_rounds
        self._episodes: Sequence[Episode] = ()

    @contextmanager
    def waiting(self, episodes: Sequence[Episode]) -> Iterator[None]:
        """Wait for these inside."""
        self._episodes = episodes
        try:
            yield
        finally:
            self._episodes = ()

    def progress(self, phase: str = "") -> list[str]:
        """Return how many are complete, and how many wait for their environment; any thread may ask."""
        episodes = self._episodes
        if not (episodes and self._in_rounds):
            return []
        complete, waiting = sum(one.finish != "" for one in episodes), sum(one.waits for one in episodes)
        known = [f"{complete} of {len(episodes)} responses complete"]
        return [*known, f"{waiting} wait for their environment"] if waiting else known
