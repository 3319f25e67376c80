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
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_rl.agents.environment_host import EnvironmentHost
from megatron_rl.agents.environment_source import EnvironmentSource
from megatron_rl.agents.observation import Message, Observation, TaskRow, TextLimit, ToolCall, Turn
from megatron_rl.config.user_functions import run_file
from megatron_rl.errors import ConfigError
from megatron_rl.plain_values import describe_error, plain_text

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

    What goes wrong with a call is a text for the policy, and counted: `environment/tool_CAUSE/mean`.
    """

    keeps_nothing = True
    """Earlier turns need not be played again."""

    def __init__(self, tools: Mapping[str, Callable[..., Any]], max_calls: int, timeout_s: float) -> None:
        """max_calls: of one turn; further ones are refused. timeout_s: seconds of one call."""
        self._tools, self._max_calls, self._timeout_s = tools, max_calls, timeout_s

    async def reset(self, row: TaskRow) -> None:
        """Nothing is kept."""

    async def step(self, turn: Turn) -> Observation:
        """Return one message of role tool for each call."""
        if turn.problem:
            return Observation((_message("", turn.problem),), counts={"tool_unreadable": 1.0})
        if not turn.calls:
            return Observation(is_done=True)
        counts: Counter[str] = Counter()
        messages = await asyncio.gather(*(self._call(place, call, counts) for place, call in enumerate(turn.calls)))
        return Observation(tuple(messages), counts={name: float(number) for name, number in counts.items()})

    async def _call(self, place: int, call: ToolCall, counts: Counter[str]) -> Message:
        counts["tool_calls"] += 1
        cause, text = await self._result(place, call)
        if cause:
            counts[f"tool_{cause}"] += 1
        return _message(call.name, text)

    async def _result(self, place: int, call: ToolCall) -> tuple[str, str]:
        """(cause of a failure or "", text for the policy)."""
        function = self._tools.get(call.name)
        if place >= self._max_calls:
            return "refused", f"Error: at most {self._max_calls} calls are made in one turn"
        if function is None:
            return "unknown", f"Error: there is no tool {call.name}; there are {', '.join(self._tools)}"
        try:
            inspect.signature(function).bind(**call.arguments)
        except TypeError as error:
            return "arguments", f"Error: {call.name}: {error}"
        try:
            value = await asyncio.wait_for(_called(function, call.arguments), self._timeout_s)
        except TimeoutError:
            return "timed_out", f"Error: {call.name} did not return within {self._timeout_s:g} s"
        except Exception as error:
            return "raised", f"Error: {describe_error(error)}"
        return "", plain_text(value) if isinstance(value, str) else plain_text(json.dumps(value, default=str))


@dataclass(frozen=True)
class ToolSource(EnvironmentSource):
    """The tools of the file `path`. key: of the path in the configuration. max_calls, timeout_s: as `ToolEnvironment`.
    limit: of messages.
    """

    path: str
    key: str
    max_calls: int
    timeout_s: float
    limit: TextLimit

    def host(self) -> EnvironmentHost:
        tools = load_tools(self.path, self.key)
        return EnvironmentHost(lambda: ToolEnvironment(tools, self.max_calls, self.timeout_s), True, self.limit)


def _message(name: str, text: str) -> Message:
    return {"role": "tool", "name": name, "content": text} if name else {"role": "tool", "content": text}


async def _called(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a function, a blocking one in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await asyncio.to_thread(function, **arguments)
