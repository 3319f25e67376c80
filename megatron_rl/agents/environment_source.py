"""Environments as the work of processes, and what crosses between them as JSON. No torch."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from megatron_rl.agents.as_json import Answer, answer_from_json
from megatron_rl.agents.environment_host import EnvironmentHost, Forget, TurnJob
from megatron_rl.agents.observation import EpisodeFailure, TextLimit
from megatron_rl.config.user_functions import load_class
from megatron_rl.user_code import keeper
from megatron_rl.user_code.work_processes import WorkProcesses

METHODS = ("reset", "step")


@dataclass(frozen=True)
class EnvironmentSource:
    """The class `name` in the file `path`; kwargs: of its constructor. key: of the path in the configuration. limit: of
    messages.
    """

    path: str
    name: str
    key: str
    kwargs: dict[str, Any]
    limit: TextLimit

    @property
    def noun(self) -> str:
        """What the user's code is."""
        return "the environment"

    @property
    def timeout_key(self) -> str:
        """The key of the time limit."""
        return "multi_turn.tool_timeout_s"

    def load(self) -> Callable[[TurnJob | Forget], Any]:
        """Return what plays jobs. Raises ConfigError where the class cannot be loaded."""
        return self.host().do

    def host(self) -> EnvironmentHost:
        """Return a host of environments. Raises ConfigError where the class cannot be loaded."""
        kind: Any = load_class(self.path, self.key, self.name, METHODS)
        is_async = any(inspect.iscoroutinefunction(getattr(kind, name, None)) for name in (*METHODS, "close"))
        return EnvironmentHost(lambda: kind(**self.kwargs), is_async, self.limit)

    def written(self, answer: Answer) -> Any:
        """Return an answer as JSON values."""
        return asdict(answer)

    def read(self, content: Any) -> Answer:
        """Return the answer of `written`. Raises ValueError for anything else."""
        return answer_from_json(content)

    def failed(self, kind: str, reason: str) -> EpisodeFailure:
        """Return the answer of an episode whose process has failed."""
        return EpisodeFailure(kind, reason)

    def too_long(self, reason: str) -> EpisodeFailure:
        """Return the answer in place of one that is too long."""
        return EpisodeFailure("no_answer", reason)


class EnvironmentsHere:
    """Environments in this process. Nothing ends a step that does not return."""

    def __init__(self, host: EnvironmentHost) -> None:
        self._host = host
        self._answers: list[tuple[int, Answer]] = []
        self._loop = asyncio.new_event_loop()

    def play(self, number: int, job: TurnJob) -> None:
        """Play a turn."""
        self._answers.append((number, self._done(self._host.do(job))))

    def take(self, waits: bool) -> list[tuple[int, Answer]]:
        """Return the answers that are there, by the numbers of `play`."""
        answers, self._answers = self._answers, []
        return answers

    def forget(self, episode: int) -> None:
        """Drop the environment of an episode, if there is one."""
        self._done(self._host.do(Forget(episode)))

    def _done(self, answer: Any) -> Any:
        return self._loop.run_until_complete(answer) if inspect.isawaitable(answer) else answer


class EnvironmentProcesses(WorkProcesses):
    """Environments in processes of their own, each episode in one of them; a context manager."""

    def __init__(self, source: EnvironmentSource, num_workers: int, timeout_s: float) -> None:
        """timeout_s: seconds that an environment may take for one turn."""
        super().__init__(keeper.KeeperSettings(source, num_workers, timeout_s))

    def play(self, number: int, job: TurnJob) -> None:
        """Have a turn played; the answer comes with `take`."""
        self.submit([keeper.Job(number, job, key=job.episode)])

    def forget(self, episode: int) -> None:
        """Drop the environment of an episode, if there is one."""
        self.notify(keeper.Notice(Forget(episode), episode))
