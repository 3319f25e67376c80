"""Environments and agents that another interpreter runs (`multi_turn.python`): one with packages that the run does not
have. One program of it, for all episodes of a process, speaks by lines of JSON (interpreter_program.py). No torch.
"""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import os
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.agents.agent_environment import WHOLE_TEXTS, AgentEnvironment, task_of
from megatron_rl.agents.agent_programs import PolicyAddress
from megatron_rl.agents.endpoint import Endpoint, EndpointLimits, Session
from megatron_rl.agents.environment_host import EnvironmentHost, Forget, TurnJob
from megatron_rl.agents.environment_source import METHODS, EnvironmentSource
from megatron_rl.agents.observation import EpisodeError, InitialConversation, Observation, TaskRow, TextLimit, Turn
from megatron_rl.cluster.child_processes import how_ended, kill_group
from megatron_rl.config.adapter_files import file_of, interpreter_problem
from megatron_rl.config.problems import missing_file, refused
from megatron_rl.errors import ConfigError, ReplayError, Violation
from megatron_rl.plain_values import finite_number, quote, strict_json

PROGRAM = Path(__file__).with_name("interpreter_program.py")
START_S, LONGEST_LINE = 300.0, 1 << 26
"""Seconds in which a program must have imported its file, and bytes of one of its replies."""
EXITED = 1
"""Code with which a worker ends after its program, so that its other episodes are played again."""


class InterpreterProgram:
    """The program of one file. methods: the class's. starts: how often it was started. ends_worker: this process ends
    when the program does. timeout_s: longest call; then the program is ended.
    """

    def __init__(self, python: str, key: str, hello: dict[str, Any], what: str) -> None:
        """Start it, and wait until it has loaded the file. key: the interpreter's. what: is loaded, for the
        ConfigError that is raised where that fails.
        """
        self._python, self._key, self._hello, self._what = python, key, hello, what
        self.ends_worker = False
        self.timeout_s: float | None = None
        self._ids, self._episodes = itertools.count(), itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.starts = 0
        self._start()

    def _start(self) -> None:
        problem, python = interpreter_problem(self._python, self._key), Path(self._python).expanduser()
        if problem is not None:
            raise refused(problem)
        ours, theirs = socket.socketpair()
        try:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [str(python), str(PROGRAM)], stdin=theirs.fileno(), start_new_session=True
            )
        except OSError as error:
            raise refused(Violation({self._key: self._python}, f"cannot be started: {error.strerror}")) from None
        finally:
            theirs.close()
        ours.settimeout(START_S)
        self._socket = ours
        self._connecting: asyncio.Task[asyncio.StreamWriter] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.starts += 1
        try:
            ours.sendall(json.dumps(self._hello, default=str).encode() + b"\n")
            said = strict_json(_first_line(ours))
            self.methods: list[str] = said.get("methods", [])
        except (OSError, ValueError, AttributeError):
            self.end()
            reason = f"{self._python} has ended, or has not loaded it within {START_S:g} s"
            raise ConfigError(f"{self._what} cannot be loaded: {reason}") from None
        if "refused" in said:
            self.end()
            raise ConfigError(
                f"{self._what} cannot be loaded by {self._python}: {said['refused']}" + self._way_out(said)
            )
        ours.setblocking(False)

    def _way_out(self, said: dict[str, Any]) -> str:
        """The command that installs the missing module."""
        missing = said.get("missing")
        return f"; try: {self._python} -m pip install {missing.partition('.')[0].replace('_', '-')}" if missing else ""

    @property
    def has_ended(self) -> bool:
        """Whether it has ended; the next call starts it again."""
        return self._process.returncode is not None

    def new_episode(self) -> int:
        """Return the number of a further episode."""
        return next(self._episodes)

    async def call(self, episode: int, name: str, *given: Any) -> Any:
        """Return the value of a call. Raises EpisodeError where it raises, and where the program ends."""
        writer = await asyncio.shield(self._connection())
        number, answer = next(self._ids), asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        content = {"id": number, "episode": episode, "call": name, "with": given}
        writer.write(json.dumps(content, default=str).encode() + b"\n")
        try:
            await asyncio.wait({answer}, timeout=self.timeout_s)
            if answer.done():
                return answer.result()
        finally:
            self._waiting.pop(number, None)
            answer.cancel()
        self.end()
        raise EpisodeError("timed_out", f"{name} has not returned within multi_turn.tool_timeout_s={self.timeout_s:g}")

    def _connection(self) -> asyncio.Task[asyncio.StreamWriter]:
        """Return the task that connects to the program, which is started again where it has ended."""
        if self._connecting is None:
            if self.has_ended:
                self._start()
            self._connecting = asyncio.ensure_future(self._connect())
        return self._connecting

    async def _connect(self) -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection(sock=self._socket, limit=LONGEST_LINE)
        self._reading = asyncio.ensure_future(self._read(reader, self._process))
        self._writer = writer
        return writer

    async def _read(self, reader: asyncio.StreamReader, process: subprocess.Popen[bytes]) -> None:
        """Hand replies to those that wait; any other one is dropped."""
        reason = ""
        try:
            while line := await reader.readline():
                said = strict_json(line)
                answer = self._waiting.pop(said["id"], None)
                if answer is not None and not answer.done():
                    _settle(answer, said)
        except (ValueError, KeyError, TypeError, OSError) as error:
            reason = f"its program wrote what is no reply: {error!r:.80}"
        if process.returncode is not None:
            return  # `end` has ended it, and another one may have taken its place
        if self.ends_worker:
            self.end()
            os._exit(EXITED)
        self.end(reason)

    def end(self, reason: str = "") -> None:
        """Kill the program with its process group; calls that wait for it fail. reason: why, if not by its end."""
        if self._writer is None:
            self._socket.close()
        else:
            # The transport lets go of the descriptor before it closes it: else it would do so when it is collected, and
            # the next program's descriptor, which may have the same number, would no longer be read.
            self._writer.transport.abort()
        if not self.has_ended:
            kill_group(self._process.pid)
        code, self._connecting = self._process.wait(), None
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(EpisodeError("crashed", reason or f"its program {how_ended(code)}"))

    async def close(self) -> None:
        """End the program and what reads its replies."""
        if self._connecting is not None:
            await self._connecting
            self._reading.cancel()
            with suppress(asyncio.CancelledError):
                await self._reading
        self.end()


def _settle(answer: asyncio.Future[Any], said: dict[str, Any]) -> None:
    if "raised" in said:
        answer.set_exception(EpisodeError("raised", f"it raised {said['raised']}"))
    else:
        answer.set_result(said["returned"])


def _methods_in(file: Path, name: str) -> set[str]:
    """Return the methods of the class `name` of a file, which is only parsed."""
    classes = (
        node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    )
    return {getattr(method, "name", "") for kind in classes for method in kind.body}


def _first_line(channel: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        piece = channel.recv(1 << 16)
        if not piece:
            raise ConnectionError
        line += piece
    return line


class InterpreterEnvironment:
    """One episode of an environment that the program plays."""

    def __init__(self, program: InterpreterProgram) -> None:
        self._program, self._episode, self._starts = program, program.new_episode(), 0

    @property
    def is_lost(self) -> bool:
        """Whether the program has ended since the episode began."""
        return self._starts != self._program.starts or self._program.has_ended

    async def reset(self, row: TaskRow) -> None:
        """Prepare for the task of a row."""
        await self._program.call(self._episode, "reset", dict(task_of(row)))
        self._starts = self._program.starts

    async def opening(self) -> InitialConversation | str | list[Any]:
        """Return how the episode begins."""
        said: Any = await self._program.call(self._episode, "opening")
        if isinstance(said, dict):
            return InitialConversation(tuple(said.get("messages", ())), tuple(said.get("tools", ())))
        value: str | list[Any] = said
        return value

    async def step(self, turn: Turn) -> Any:
        """Return the reply to a turn."""
        return self._reply(await self._program.call(self._episode, "step", asdict(turn)))

    async def cut(self, turn: Turn) -> Any:
        """Return the reward of an episode that is cut off after a turn."""
        return self._reply(await self._program.call(self._episode, "cut", asdict(turn)))

    def _reply(self, said: Any) -> Any:
        if isinstance(said, dict):
            anew = said.get("anew")
            try:
                return Observation(**said | {"anew": anew and InitialConversation(tuple(anew["messages"]))})
            except TypeError as error:
                raise EpisodeError("no_answer", f"step must return the fields of an Observation: {error}") from None
        return tuple(said) if isinstance(said, list) else said

    async def close(self) -> None:
        """Let the program drop it."""
        if not self.is_lost:
            await self._program.call(self._episode, "close")


class InterpreterAgent:
    """One episode of an agent that the program runs."""

    def __init__(self, program: InterpreterProgram, task: TaskRow, session: Session) -> None:
        address = PolicyAddress(session.base_url, session.api_key)
        urls = {"anthropic_base_url": address.anthropic_base_url, "session_url": address.session_url}
        given = asdict(address) | urls
        self._program, self._episode = program, program.new_episode()
        self._ended = asyncio.ensure_future(program.call(self._episode, "run", dict(task), given))

    async def end(self) -> float | None:
        """Wait until it has ended; returns its reward."""
        value = await asyncio.shield(self._ended)
        reward = finite_number(value)
        if value is not None and reward is None:
            raise EpisodeError("no_answer", f"an agent must return a finite number or None, not {quote(value)}")
        return reward

    async def stop(self) -> None:
        """Cancel it, if it has not ended."""
        if not self._ended.done():
            self._ended.cancel()
            with suppress(EpisodeError):
                await self._program.call(self._episode, "close")
        elif not self._ended.cancelled():
            self._ended.exception()


class UnplayedEnvironments:
    """Environments of a replay, whose replies are recorded. opens: they begin their episodes. hears_cuts: they hear of
    one that is cut off.
    """

    def __init__(self, opens: bool, hears_cuts: bool) -> None:
        self.opens, self.hears_cuts = opens, hears_cuts

    def play(self, number: int, job: TurnJob) -> None:
        """Raise ReplayError: the schedule has no reply to this turn."""
        raise ReplayError(f"episode {job.episode} has a turn to which the schedule has no reply")

    def take(self, waits: bool) -> list[tuple[int, Any]]:
        """Return no replies."""
        return []

    def forget(self, episode: int) -> None:
        """Keep nothing."""


@dataclass(frozen=True)
class InterpreterSource(EnvironmentSource):
    """The environment or the agent `name` of the file `path`, run by the interpreter `python`. python_key, key: of both
    in the configuration. limit: for messages. timeout_s: longest call. is_agent: it is a function of (task, endpoint).
    endpoint_limits: bound an agent's requests. reads_images: messages may show some.
    """

    python: str
    python_key: str
    path: str
    key: str
    name: str
    kwargs: dict[str, Any]
    limit: TextLimit
    timeout_s: float
    is_agent: bool
    endpoint_limits: EndpointLimits = EndpointLimits()
    reads_images: bool = False

    def load(self) -> Callable[[TurnJob | Forget], Any]:
        """Return a function that plays jobs in a worker. The worker ends with its program, and others play again."""
        program = self._program()
        program.ends_worker = True
        return self._host(program).do

    def unplayed(self) -> UnplayedEnvironments:
        """Return what takes their place in a replay, for which their packages need not exist."""
        methods = () if self.is_agent else _methods_in(self._file(), self.name)
        return UnplayedEnvironments(*(self.is_agent or name in methods for name in ("opening", "cut")))

    def host(self) -> EnvironmentHost:
        program = self._program()
        program.timeout_s = None if self.is_agent else self.timeout_s  # an agent has it between its requests
        host = self._host(program)
        host.plays_together = self.is_agent  # a call that takes too long ends the program, and others' calls
        return host

    def _file(self) -> Path:
        file = Path(file_of(self.path, self.key)).expanduser()
        if not file.is_file():
            raise refused(missing_file(self.key, self.path, file, (".py",)))
        return file

    def _program(self) -> InterpreterProgram:
        file = self._file()
        methods = [] if self.is_agent else METHODS
        hello = {"file": str(file), "name": self.name, "methods": methods, "kwargs": self.kwargs}
        return InterpreterProgram(self.python, self.python_key, hello, f"{self.key}={self.path}")

    def _host(self, program: InterpreterProgram) -> EnvironmentHost:
        if not self.is_agent:
            opens = "opening" in program.methods
            keys = (True, self.limit, opens, program.close, self.reads_images, "cut" in program.methods)
            return EnvironmentHost(lambda: InterpreterEnvironment(program), *keys)
        endpoint = Endpoint(self.endpoint_limits)

        def start(task: TaskRow, session: Session) -> InterpreterAgent:
            return InterpreterAgent(program, task, session)

        async def close() -> None:
            await endpoint.stop()
            await program.close()

        made = partial(AgentEnvironment, start, endpoint, self.timeout_s, self.reads_images)
        return EnvironmentHost(made, True, WHOLE_TEXTS, True, close, self.reads_images, hears_cuts=True)
