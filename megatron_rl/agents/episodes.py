"""Answer the turns of open episodes: a turn goes to its environment as text, and what it reads next comes as tokens."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.agents.as_json import Answer
from megatron_rl.agents.environment_host import TurnJob
from megatron_rl.agents.episode import Episode, Reply
from megatron_rl.agents.observation import EpisodeFailure, Turn
from megatron_rl.agents.tool_parser import ToolParser
from megatron_rl.agents.turn_renderer import TurnRenderer
from megatron_rl.data.template_process import TemplateRefusal
from megatron_rl.errors import ReplayError


class Environments(Protocol):
    """Where environments are."""

    def play(self, number: int, job: TurnJob) -> None:
        """Have a turn played; the answer comes with `take`."""

    def take(self, waits: bool) -> list[tuple[int, Answer]]:
        """Return the answers that are there, by the numbers of `play`. waits: until there is one, if a job is open."""

    def forget(self, episode: int) -> None:
        """Drop the environment of an episode, if there is one."""


class Episodes:
    """Answers turns. The number of an episode is that of its request.

    max_turns: of the policy in an episode. record: is told every answer.
    """

    def __init__(self, max_turns: int) -> None:
        self.max_turns = max_turns
        self.record: Callable[[int, Reply], None] = lambda number, reply: None
        self._arrived: list[tuple[int, Reply]] = []

    @property
    def is_open(self) -> bool:
        """Whether a turn waits for its answer."""
        raise NotImplementedError

    def submit(self, number: int, episode: Episode) -> None:
        """Have the turn answered with which an episode waits."""
        raise NotImplementedError

    def forget(self, number: int) -> None:
        """Drop what belongs to an episode that has ended or begins again."""

    def take(self, waits: bool = False) -> list[tuple[int, Reply]]:
        """Return the answers that are there. waits: until there is one, if a turn waits for its answer."""
        arrived, self._arrived = self._arrived, []
        return arrived or self._take(waits)

    def play(self, waiting: Mapping[int, Episode]) -> Iterator[tuple[int, Reply]]:
        """Answer the turns of all these episodes. Answers to other turns are kept for `take`."""
        for number, episode in waiting.items():
            self.submit(number, episode)
        num_open = len(waiting)
        while num_open:
            for number, reply in self._take(waits=True):
                if number in waiting:
                    num_open -= 1
                    yield number, reply
                else:
                    self._arrived.append((number, reply))

    def _take(self, waits: bool) -> list[tuple[int, Reply]]:
        replies = self._replies(waits)
        for number, reply in replies:
            self.record(number, reply)
        return replies

    def _replies(self, waits: bool) -> list[tuple[int, Reply]]:
        raise NotImplementedError


class RecordedEpisodes(Episodes):
    """Answers turns as a recorded run did; no environment runs.

    Raises ReplayError where a turn is another than the recorded one.
    """

    def __init__(self, max_turns: int, recorded: Iterable[tuple[int, Reply]]) -> None:
        """recorded: (number, answer) in the order in which a run had them."""
        super().__init__(max_turns)
        self._recorded: dict[int, deque[Reply]] = defaultdict(deque)
        for number, reply in recorded:
            self._recorded[number].append(reply)
        self._ready: list[tuple[int, Reply]] = []

    @property
    def is_open(self) -> bool:
        return bool(self._ready)

    def submit(self, number: int, episode: Episode) -> None:
        if not self._recorded[number]:
            raise ReplayError(f"a turn of request {number} ended that has no answer in the recorded schedule")
        self._ready.append((number, self._recorded[number].popleft()))

    def _replies(self, waits: bool) -> list[tuple[int, Reply]]:
        ready, self._ready = self._ready, []
        return ready


@dataclass(frozen=True)
class _OpenTurn:
    number: int
    turn: Turn
    last_token: int


class LiveEpisodes(Episodes):
    """Answers turns by environments."""

    def __init__(
        self, environments: Environments, renderer: TurnRenderer, max_turns: int, parser: ToolParser | None = None
    ) -> None:
        """parser: of tool calls; None: a turn is its text."""
        super().__init__(max_turns)
        self._environments, self._renderer, self._parser = environments, renderer, parser
        self._open: dict[int, _OpenTurn] = {}
        self._jobs = itertools.count()

    @property
    def is_open(self) -> bool:
        return bool(self._open or self._arrived)

    def submit(self, number: int, episode: Episode) -> None:
        ids, job = episode.turn_ids, next(self._jobs)
        turn = Turn(self._renderer.text_of(ids)) if self._parser is None else self._parser.turn(ids)
        self._open[job] = _OpenTurn(number, turn, ids[-1])
        self._environments.play(job, TurnJob(number, episode.row, tuple(episode.played), turn))

    def forget(self, number: int) -> None:
        self._open = {job: known for job, known in self._open.items() if known.number != number}
        self._environments.forget(number)

    def _replies(self, waits: bool) -> list[tuple[int, Reply]]:
        answers = self._environments.take(waits)
        known = [(self._open.pop(job), answer) for job, answer in answers if job in self._open]
        return [(known.number, self._reply(known, answer)) for known, answer in known]

    def _reply(self, known: _OpenTurn, answer: Answer) -> Reply:
        if isinstance(answer, EpisodeFailure) or answer.is_done:
            return Reply(known.turn, answer)
        try:
            ids = self._renderer.following(answer.messages, known.last_token)
        except TemplateRefusal as refusal:
            reason = f"the chat template refuses the observation: {refusal}"
            return Reply(known.turn, EpisodeFailure("no_answer", reason))
        return Reply(known.turn, answer, tuple(ids))
