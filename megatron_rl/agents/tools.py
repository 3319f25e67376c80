"""Tools: typed, documented functions of the user's that the policy calls by name. No torch.

    from megatron_rl.agents.tools import tool

    @tool
    def add(a: int, b: int) -> str:
        '''Add two numbers.

        Args:
            a: the first
            b: the second
        '''
        return str(a + b)

The chat template is given their schemas. A function may be async.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from megatron_rl.agents.class_tools import ClassTool, EpisodeTool, load_class_tools
from megatron_rl.agents.environment_host import EnvironmentHost
from megatron_rl.agents.environment_source import EnvironmentSource
from megatron_rl.agents.image_parts import shows_images
from megatron_rl.agents.observation import Message, Observation, TaskRow, TextLimit, ToolCall, Turn
from megatron_rl.config.user_functions import run_file
from megatron_rl.errors import ConfigError
from megatron_rl.plain_values import describe_error, finite_number, plain_text
from megatron_rl.user_code.user_calls import CallFailedError, called, within

MARK = "_is_tool"
Function = TypeVar("Function", bound=Callable[..., Any])


def tool(function: Function) -> Function:
    """Mark a function of a file as a tool."""
    setattr(function, MARK, True)
    return function


def load_tools(path: str, key: str) -> dict[str, Callable[..., Any]]:
    """Run a file and return its tools by name. key: of the path in the configuration.

    Raises ConfigError where it fails to run or marks no function.
    """
    functions = vars(run_file(path, key)).items()
    tools = {name: value for name, value in functions if getattr(value, MARK, False) is True}
    if not tools:
        raise ConfigError(f"{key}={path} must mark a function with @tool (megatron_rl.agents.tools)")
    return tools


def schemas_of(tools: dict[str, Callable[..., Any]], key: str) -> list[dict[str, Any]]:
    """Return the JSON schema of each tool, from its types and its docstring. Raises ConfigError where these do not say
    what each argument is.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    schemas = []
    for name, function in tools.items():
        try:
            schemas.append(get_json_schema(function))
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise ConfigError(
                f"{key}: the tool {name} needs a type and a line under Args: for each argument: {error}"
            ) from error
    return schemas


class ToolEnvironment:
    """Answers the calls of a turn; a turn without one is the last.

    What goes wrong with a call is a text for the policy, and counted: `environment/tool_CAUSE/mean`. A tool may return
    (text, reward, numbers to log).
    """

    def __init__(
        self,
        tools: Mapping[str, Callable[..., Any] | ClassTool],
        max_calls: int,
        timeout_s: float,
        gives_rewards: bool = False,
    ) -> None:
        """max_calls: of one turn; further ones are refused. timeout_s: seconds of one call. gives_rewards: rewards of
        tools count in the score; else they are logged alone.
        """
        self._known, self._max_calls, self._timeout_s = tools, max_calls, timeout_s
        self._gives_rewards = gives_rewards
        self._tools: dict[str, Callable[..., Any]] = {}
        self._shows_images = False
        # Functions keep nothing, so earlier turns need not be played again.
        self.keeps_nothing = not any(isinstance(tool, ClassTool) for tool in tools.values())

    async def reset(self, row: TaskRow) -> None:
        """Take the tools for the task of a row."""
        known, self._shows_images = self._known.items(), "images" in row
        self._tools = {name: tool.opened(row) if isinstance(tool, ClassTool) else tool for name, tool in known}

    async def step(self, turn: Turn) -> Observation:
        """Return one message of role tool for each call."""
        if turn.problem:
            return Observation((_message("", turn.problem),), counts={"tool_unreadable": 1.0})
        if not turn.calls:
            return Observation(is_done=True)
        counts: Counter[str] = Counter()
        messages = await asyncio.gather(*(self._call(place, call, counts) for place, call in enumerate(turn.calls)))
        reward = float(counts["tool_reward"]) if self._gives_rewards else 0.0
        return Observation(tuple(messages), reward, counts={name: float(number) for name, number in counts.items()})

    async def close(self) -> None:
        """Release what tools have created."""
        for tool in self._tools.values():
            if isinstance(tool, EpisodeTool):
                with suppress(Exception):
                    await tool.release()

    async def _call(self, place: int, call: ToolCall, counts: Counter[str]) -> Message:
        counts["tool_calls"] += 1
        try:
            value, known = await self._value(place, call), dict[str, Any]()
            if isinstance(value, tuple) and len(value) == 3 and isinstance(value[2], dict):
                value, known = value[0], {"tool_reward": value[1], **value[2]}
            if self._shows_images and shows_images(value):
                return _message(call.name, value if isinstance(value, list) else [{"type": "image", "image": value}])
            text = value if isinstance(value, str) else _as_json(call.name, value)
        except _CallError as error:
            counts[f"tool_{error.cause}"] += 1
            return _message(call.name, f"Error: {error}")
        counts.update({name: number for name, each in known.items() if (number := finite_number(each)) is not None})
        return _message(call.name, plain_text(text))

    async def _value(self, place: int, call: ToolCall) -> Any:
        """What the tool returns. Raises _CallError."""
        function = self._tools.get(call.name)
        if place >= self._max_calls:
            raise _CallError("refused", f"at most {self._max_calls} calls are made in one turn")
        if function is None:
            raise _CallError("unknown", f"there is no tool {call.name}; there are {', '.join(self._tools)}")
        try:
            if isinstance(function, EpisodeTool):
                function.check(call.arguments)
            else:
                inspect.signature(function).bind(**call.arguments)
        except TypeError as error:
            raise _CallError("arguments", f"{call.name}: {error}") from None
        try:
            return await within(_called(function, call.arguments), self._timeout_s)
        except TimeoutError:
            raise _CallError("timed_out", f"{call.name} did not return within {self._timeout_s:g} s") from None
        except CallFailedError as error:
            raise _CallError("raised", str(error)) from None
        except Exception as error:
            raise _CallError("raised", describe_error(error)) from None


class _CallError(Exception):
    """A call has failed; the message is for the policy."""

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


@dataclass(frozen=True)
class ToolSource(EnvironmentSource):
    """The tools of a file: functions of a Python file, or classes of a YAML file (is_yaml).

    key: of the path in the configuration. limit: of messages. max_calls, timeout_s, gives_rewards: as
    `ToolEnvironment`. reads_images: results may show some.
    """

    path: str
    key: str
    is_yaml: bool
    max_calls: int
    timeout_s: float
    gives_rewards: bool
    limit: TextLimit
    reads_images: bool = False

    def schemas(self) -> list[dict[str, Any]]:
        """Return the schema of each tool. Raises ConfigError as `load_tools`, `schemas_of` and `load_class_tools`."""
        if self.is_yaml:
            return [tool.schema for tool in load_class_tools(self.path, self.key).values()]
        return schemas_of(load_tools(self.path, self.key), self.key)

    def host(self) -> EnvironmentHost:
        tools = (load_class_tools if self.is_yaml else load_tools)(self.path, self.key)
        keys = (self.max_calls, self.timeout_s, self.gives_rewards)
        return EnvironmentHost(lambda: ToolEnvironment(tools, *keys), True, self.limit, reads_images=self.reads_images)


def _message(name: str, content: str | list[Any]) -> Message:
    return {"role": "tool", "name": name, "content": content} if name else {"role": "tool", "content": content}


def _as_json(name: str, value: Any) -> str:
    """Return a tool's result as JSON. Raises _CallError for what JSON cannot have."""
    try:
        return json.dumps(value, default=_own_text)
    except Exception as error:  # a generator, a cycle, too deep, keys that are no texts, an object that cannot be shown
        reason = f"{name} returned what JSON cannot have: {describe_error(error)}"
        raise _CallError("raised", reason) from None


def _own_text(value: Any) -> str:
    """Return the text of an object. Raises TypeError for one that has none but its address, another in each process."""
    text = str(value)
    if text.endswith(f" at {id(value):#x}>"):
        raise TypeError(f"an object of type {type(value).__name__} has no text")
    return text


async def _called(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a function, a blocking one in a thread."""
    is_async = isinstance(function, EpisodeTool) or inspect.iscoroutinefunction(function)
    return await called(partial(function, **arguments), is_async)
