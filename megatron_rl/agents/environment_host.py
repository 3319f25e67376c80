"""Play turns in environments that this process keeps, one for each open episode. No torch.

A job has all earlier turns of its episode with their answers. Where the environment of the episode is not here, because
its process has died or the run has resumed, a fresh one plays them first, and must answer as it did before.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.agents.as_json import Played
from megatron_rl.agents.observation import (
    Environment,
    EpisodeFailure,
    Observation,
    TaskRow,
    TextLimit,
    Turn,
    observation_of,
    settled,
)
from megatron_rl.plain_values import describe_error


@dataclass(frozen=True)
class TurnJob:
    """Play `turn` in the environment of an episode. before: its earlier turns. row: its task."""

    episode: int
    row: TaskRow
    before: tuple[Played, ...]
    turn: Turn


@dataclass
class _Kept:
    environment: Environment
    before: list[Played] = field(default_factory=list)


@dataclass(frozen=True)
class Forget:
    """Drop the environment of an episode, if there is one."""

    episode: int


class EnvironmentHost:
    """Keeps environments by episode."""

    def __init__(self, make: Callable[[], Environment], is_async: bool, limit: TextLimit) -> None:
        """make: returns a fresh environment. is_async: some of its methods are. limit: of messages."""
        self._make, self._is_async, self._limit = make, is_async, limit
        self._kept: dict[int, _Kept] = {}

    def do(self, message: TurnJob | Forget) -> Any:
        """Return the environment's answer to a job, or an awaitable one if the environment is async."""
        waiting = self._forget(message.episode) if isinstance(message, Forget) else self._answer(message)
        return waiting if self._is_async else _result(waiting)

    async def _answer(self, job: TurnJob) -> Observation | EpisodeFailure:
        try:
            answer = await self._play(job)
        except Exception as error:
            answer = EpisodeFailure("raised", f"the environment raised {describe_error(error)}")
        if isinstance(answer, EpisodeFailure) or answer.is_done:
            await self._forget(job.episode)
        return answer

    async def _forget(self, episode: int) -> None:
        """An environment has a method `close` if it must let something go."""
        kept = self._kept.pop(episode, None)
        close = getattr(kept and kept.environment, "close", None)
        if close is not None:
            with suppress(Exception):
                await settled(close())

    async def _play(self, job: TurnJob) -> Observation | EpisodeFailure:
        kept = self._kept.get(job.episode)
        if kept is None or kept.before != list(job.before):
            kept = self._kept[job.episode] = _Kept(self._make())
            await settled(kept.environment.reset(job.row))
            needed = () if getattr(kept.environment, "keeps_nothing", False) else job.before
            for number, (turn, answer) in enumerate(needed):
                again = await self._step(kept.environment, turn)
                if again != answer:
                    return EpisodeFailure(
                        "not_repeatable",
                        f"the environment was played again and answered turn {number + 1} with {again!r:.200} instead "
                        f"of {answer!r:.200}",
                    )
            kept.before = list(job.before)
        last = await self._step(kept.environment, job.turn)
        if isinstance(last, Observation):
            kept.before.append((job.turn, last))
        return last

    async def _step(self, environment: Environment, turn: Turn) -> Observation | EpisodeFailure:
        value: Any = await settled(environment.step(turn))
        try:
            return observation_of(value, self._limit)
        except ValueError as error:
            return EpisodeFailure("no_answer", str(error))


def _result(waiting: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that waits for nothing."""
    try:
        waiting.send(None)
    except StopIteration as done:
        return done.value
    waiting.close()
    raise RuntimeError("an environment without async methods returned an awaitable")
