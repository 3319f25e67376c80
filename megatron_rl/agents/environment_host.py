"""Play turns in environments that this process keeps, one for each open episode. No torch.

A job has all earlier turns of its episode with their replies. Where the environment of the episode is not here, because
its process has died or the run has resumed, a fresh one plays them first, and must answer as it did before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from megatron_rl.agents.as_json import Answer, Played, WithImages, plain_answer
from megatron_rl.agents.image_parts import EpisodeImages, Images
from megatron_rl.agents.observation import (
    Environment,
    EpisodeError,
    EpisodeFailure,
    InitialConversation,
    Observation,
    TaskRow,
    TextLimit,
    Turn,
    observation_of,
    opening_of,
    settled,
)
from megatron_rl.plain_values import describe_error
from megatron_rl.user_code.user_calls import is_ending

Shown = TypeVar("Shown", Observation, InitialConversation)

NOT_HERE = EpisodeFailure("not_here", "")
"""The reply to a short job where the environment is not that of the episode, or has not come so far."""


@dataclass(frozen=True)
class TurnJob:
    """Play `turn` in the environment of an episode; None: begin the episode. row: its task.

    before: its earlier turns. opening: how it began, if its environment has begun it. num_left_out: the first of the
    earlier turns that are not in `before`; an environment that has not played that many answers NOT_HERE. is_over: the
    episode has no tokens or turns left, and `turn` is the last.
    """

    episode: int
    row: TaskRow
    before: tuple[Played, ...]
    turn: Turn | None
    opening: InitialConversation | None = None
    num_left_out: int = 0
    is_over: bool = False

    def short(self) -> TurnJob:
        """Return it with the last of the earlier turns alone, for an environment that has played them."""
        left_out = max(0, len(self.before) - 1)
        if not left_out:
            return self
        return replace(self, row={}, before=self.before[left_out:], opening=None, num_left_out=left_out)


@dataclass
class _Kept:
    environment: Environment
    images: EpisodeImages
    before: list[Played] = field(default_factory=list)


@dataclass(frozen=True)
class Forget:
    """Drop the environment of an episode, if there is one."""

    episode: int


class EnvironmentHost:
    """Keeps environments by episode. opens: they begin their episodes. hears_cuts: they have a method `cut`.
    plays_together: turns may be played at the same time. passing: exceptions that end the process, and are no failures
    of an episode.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        is_async: bool,
        limit: TextLimit,
        opens: bool = False,
        close: Callable[[], Awaitable[None]] | None = None,
        reads_images: bool = False,
        hears_cuts: bool = False,
    ) -> None:
        """make: returns a fresh environment. is_async: some of its methods are. limit: of messages. close: ends what
        all of them share. reads_images: their messages may show images.
        """
        self._reads_images = reads_images
        self._make, self._is_async, self._limit, self.opens, self._close = make, is_async, limit, opens, close
        self.hears_cuts, self.plays_together = hears_cuts, is_async
        self._kept: dict[int, _Kept] = {}
        self.passing: tuple[type[BaseException], ...] = ()

    def do(self, message: TurnJob | Forget) -> Any:
        """Return the environment's reply to a job, or an awaitable one if the environment is async."""
        waiting = self._forget(message.episode) if isinstance(message, Forget) else self._answer(message)
        return waiting if self._is_async else _result(waiting)

    async def close(self) -> None:
        """Drop all environments, and what makes them."""
        for episode in list(self._kept):
            await self._forget(episode)
        if self._close is not None:
            await self._close()

    async def _answer(self, job: TurnJob) -> Answer | WithImages:
        try:
            answer = await self._play(job)
        except EpisodeError as error:
            answer = plain_answer(EpisodeFailure(error.cause, str(error)))
        except BaseException as error:  # `SystemExit` and the like would end the process, and others' episodes
            if is_ending(error) or isinstance(error, self.passing):
                raise
            answer = EpisodeFailure("raised", f"the environment raised {describe_error(error)}")
        if isinstance(answer, EpisodeFailure) or (isinstance(answer, Observation) and answer.is_done):
            await self._forget(job.episode)
        kept = self._kept.get(job.episode)
        shown = {} if kept is None else kept.images.take()
        return WithImages(answer, shown) if shown else answer

    async def _forget(self, episode: int) -> None:
        """An environment has a method `close` if it must let something go."""
        kept = self._kept.pop(episode, None)
        close = getattr(kept and kept.environment, "close", None)
        if close is not None:
            with suppress(Exception):
                await settled(close())

    async def _play(self, job: TurnJob) -> Answer:
        kept = self._kept.get(job.episode)
        if kept is not None and getattr(kept.environment, "is_lost", False):
            kept = None
        if job.turn is None:
            kept, opening = await self._begun(job)
            return opening if opening is not None else EpisodeFailure("no_answer", "the environment has no opening")
        if kept is None or len(kept.before) < job.num_left_out or kept.before[job.num_left_out :] != list(job.before):
            if job.num_left_out:
                return NOT_HERE
            kept, opening = await self._begun(job)
            if opening != job.opening:
                return _differs("began with", opening, job.opening)
            needed = () if getattr(kept.environment, "keeps_nothing", False) else job.before
            for number, (turn, answer) in enumerate(needed):
                again = await self._step(kept, turn)
                if again != answer:
                    return _differs(f"replied to turn {number + 1} with", again, answer)
            kept.before = list(job.before)
        last = await (self._cut(kept.environment, job.turn) if job.is_over else self._step(kept, job.turn))
        if isinstance(last, Observation):
            kept.before.append((job.turn, last))
        return last

    async def _begun(self, job: TurnJob) -> tuple[_Kept, InitialConversation | None]:
        """A fresh environment, prepared for its task, and how its episode begins."""
        await self._forget(job.episode)
        environment: Any = self._make()
        # An agent's endpoint keeps the images of its requests.
        kept = _Kept(environment, getattr(environment, "episode_images", None) or EpisodeImages())
        self._kept[job.episode] = kept
        await settled(environment.reset(job.row))
        if not self.opens:
            return kept, None
        said: Any = await settled(environment.opening())
        try:
            opening = plain_answer(self._kept_images(kept, lambda images: opening_of(said, images)))
        except ValueError as error:
            raise EpisodeError("no_answer", str(error)) from None
        if not isinstance(opening, InitialConversation):
            raise EpisodeError("no_answer", getattr(opening, "reason", ""))
        return kept, opening

    async def _step(self, kept: _Kept, turn: Turn) -> Answer:
        value: Any = await settled(kept.environment.step(turn))
        try:
            return plain_answer(self._kept_images(kept, lambda images: observation_of(value, self._limit, images)))
        except ValueError as error:
            return EpisodeFailure("no_answer", str(error))

    def _kept_images(self, kept: _Kept, read: Callable[[Images | None], Shown]) -> Shown:
        """Return the result of `read`, and keep the images that it shows."""
        images: Images | None = {} if self._reads_images else None
        answer = read(images)
        kept.images.add(images or {})
        return answer

    async def _cut(self, environment: Any, turn: Turn) -> Answer:
        """Return the end of an episode that has been cut off, with the reward that its environment gives it."""
        value: Any = await settled(environment.cut(turn))
        if not isinstance(value, tuple | Observation):
            value = (None, 0.0 if value is None else value, True)
        try:
            given = observation_of(value, self._limit)
        except ValueError as error:
            return EpisodeFailure("no_answer", f"cut must return a reward, None, or what step returns: {error}")
        return plain_answer(Observation((), given.reward, True, given.counts, is_unread=given.is_unread))


def _differs(what: str, again: object, before: object) -> EpisodeFailure:
    reason = f"the environment was played again and {what} {again!r:.200} instead of {before!r:.200}"
    return EpisodeFailure("not_repeatable", reason)


def _result(waiting: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that waits for nothing. Where it waits, that is an error of the environment."""
    try:
        waiting.send(None)
        waiting.throw(RuntimeError("it has no `async` method but returned something to wait for; try: async def step"))
    except StopIteration as done:
        return done.value
    waiting.close()
    raise RuntimeError("an environment without async methods returned an awaitable")
