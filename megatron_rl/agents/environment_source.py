"""Environments as the work of processes, and what crosses between them as JSON. No torch."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Self

from megatron_rl.agents.as_json import Answer, WithImages, as_json, from_json
from megatron_rl.agents.environment_host import NOT_HERE, EnvironmentHost, Forget, TurnJob
from megatron_rl.agents.observation import EpisodeFailure, TextLimit
from megatron_rl.cluster.child_processes import adopting_orphans
from megatron_rl.config.user_functions import load_class
from megatron_rl.user_code import worker_supervisor
from megatron_rl.user_code.user_calls import USERS
from megatron_rl.user_code.work_processes import WorkProcesses, job_of

METHODS = ("reset", "step")
MOST_TOGETHER = 32
"""Turns that environments of one process, which wait for something, play at the same time."""


class EnvironmentSource:
    """Makes the host of environments in each process that keeps some. It is pickled. noun: what the user's code is."""

    noun = "the environment"
    timeout_key = "multi_turn.tool_timeout_s"
    unusable = "no_answer"

    def load(self) -> Callable[[TurnJob | Forget], Any]:
        """Return what plays jobs. Raises ConfigError where the user's code cannot be loaded."""
        return self.host().do

    def host(self) -> EnvironmentHost:
        """Return a host of environments. Raises ConfigError where the user's code cannot be loaded."""
        raise NotImplementedError

    def written(self, answer: Answer | WithImages) -> Any:
        """Return a reply as JSON values."""
        return as_json(answer)

    def read(self, content: Any) -> Answer | WithImages:
        """Return the reply of `written`. Raises ValueError for anything else."""
        return NOT_HERE if content == asdict(NOT_HERE) else from_json(content)

    def failed(self, kind: str, reason: str) -> EpisodeFailure:
        """Return the reply of an episode whose process has failed."""
        return EpisodeFailure(kind, reason)


@dataclass(frozen=True)
class ClassSource(EnvironmentSource):
    """The class `name` in the file `path`; kwargs: of its constructor. key: of the path in the configuration. limit: of
    messages. reads_images: observations may show some.
    """

    path: str
    name: str
    key: str
    kwargs: dict[str, Any]
    limit: TextLimit
    reads_images: bool = False

    def host(self) -> EnvironmentHost:
        kind: Any = load_class(self.path, self.key, self.name, METHODS, self.kwargs)
        methods = {name: getattr(kind, name, None) for name in (*METHODS, "opening", "cut", "close")}
        is_async = any(map(inspect.iscoroutinefunction, methods.values()))
        opens, hears_cuts = methods["opening"] is not None, methods["cut"] is not None
        return EnvironmentHost(
            lambda: kind(**self.kwargs),
            is_async,
            self.limit,
            opens,
            reads_images=self.reads_images,
            hears_cuts=hears_cuts,
        )


class EnvironmentsHere:
    """Environments in this process; a context manager. Nothing ends a step that does not return. Turns are played when
    replies are asked for, by async environments together.
    """

    def __init__(self, host: EnvironmentHost) -> None:
        self._host = host
        host.passing = USERS
        self._turns: list[tuple[int, TurnJob]] = []
        self._loop, self._adopting = asyncio.new_event_loop(), ExitStack()

    def __enter__(self) -> Self:
        """Adopt what the programs of agents leave, so that it is found and ended."""
        self._adopting.enter_context(adopting_orphans())
        return self

    def __exit__(self, *failure: object) -> None:
        with self._adopting:
            self._loop.run_until_complete(self._host.close())
            self._loop.close()

    @property
    def opens(self) -> bool:
        """Whether environments begin their episodes."""
        return self._host.opens

    @property
    def hears_cuts(self) -> bool:
        """Whether environments hear of an episode that is cut off."""
        return self._host.hears_cuts

    def play(self, number: int, job: TurnJob) -> None:
        """Have a turn played; the reply comes with `take`."""
        self._turns.append((number, job))

    def take(self, waits: bool) -> list[tuple[int, Answer | WithImages]]:
        """Return the replies to all turns, by the numbers of `play`."""
        turns, self._turns = self._turns, []
        if not self._host.plays_together:
            return [(number, self._done(self._host.do(job))) for number, job in turns]
        numbers, jobs = [number for number, _ in turns], [job for _, job in turns]
        return list(zip(numbers, self._loop.run_until_complete(self._together(jobs)), strict=True))

    def forget(self, episode: int) -> None:
        """Drop the environment of an episode, if there is one, and its turn."""
        self._turns = [(number, job) for number, job in self._turns if job.episode != episode]
        self._done(self._host.do(Forget(episode)))

    async def _together(self, jobs: list[TurnJob]) -> list[Answer | WithImages]:
        room = asyncio.Semaphore(MOST_TOGETHER)

        async def played(job: TurnJob) -> Answer | WithImages:
            async with room:
                answer: Answer | WithImages = await self._host.do(job)
                return answer

        return await asyncio.gather(*map(played, jobs))

    def _done(self, answer: Any) -> Any:
        return self._loop.run_until_complete(answer) if inspect.isawaitable(answer) else answer


class EnvironmentProcesses(WorkProcesses):
    """Environments in processes of their own, each episode in one of them; a context manager."""

    def __init__(
        self,
        source: EnvironmentSource,
        num_workers: int,
        timeout_s: float,
        opens: bool = False,
        hears_cuts: bool = False,
    ) -> None:
        """timeout_s: seconds that an environment may take for one turn. opens: environments begin their episodes.
        hears_cuts: they hear of one that is cut off.
        """
        super().__init__(worker_supervisor.WorkerSettings(source, num_workers, timeout_s))
        self.opens, self.hears_cuts = opens, hears_cuts
        self._turns: dict[int, TurnJob] = {}

    def play(self, number: int, job: TurnJob) -> None:
        """Have a turn played; the reply comes with `take`. A later turn goes without its row and the turns before it,
        and is sent whole where its environment has been lost.
        """
        self._turns[number] = job
        self.submit([job_of(number, job.short(), job.episode)])

    def take(self, waits: bool) -> list[tuple[int, Answer | WithImages]]:
        while taken := super().take(waits):
            lost = {number: self._turns[number] for number, answer in taken if answer == NOT_HERE}
            self.submit([job_of(number, job, job.episode) for number, job in lost.items()])
            answers = [(number, answer) for number, answer in taken if number not in lost]
            for number, _ in answers:
                self._turns.pop(number, None)
            if answers or not waits:
                return answers
        return []

    def forget(self, episode: int) -> None:
        """Drop the environment of an episode, if there is one."""
        self.notify(worker_supervisor.Notice(pickle.dumps(Forget(episode)), episode))
