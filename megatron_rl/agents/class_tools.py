"""Tools that are classes, named in a YAML file as verl has them. No torch.

    tools:
      - class_name: my_tools.Search          # a class that Python can import
        config: {}                           # the first argument of its constructor
        tool_schema: {type: function, function: {name: search, parameters: {...}}}

A class has `create`, `execute` and `release`; all may be async. One object serves all episodes of a process, each under
an instance id of its own. What a row of the dataset gives to them is `extra_info.tools_kwargs`, by the tool's name.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from megatron_rl.agents.observation import TaskRow, settled
from megatron_rl.config.problems import missing_file, refused
from megatron_rl.errors import ConfigError
from megatron_rl.plain_values import describe_error

METHODS = ("create", "execute", "release")


class ToolSchema(SimpleNamespace):
    """A schema whose parts are attributes, as classes of verl's read them."""

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Return it as JSON values."""
        content: dict[str, Any] = json.loads(json.dumps(self, default=vars))
        return content


class ClassTool:
    """A tool of the user's. schema: of its calls, for the chat template."""

    def __init__(self, tool: Any, schema: dict[str, Any]) -> None:
        self.schema, self._tool = schema, tool
        self._ids = itertools.count()

    def opened(self, row: TaskRow) -> EpisodeTool:
        """Return it for the episode of a row."""
        name = self.schema["function"]["name"]
        given = ((row.get("extra_info") or {}).get("tools_kwargs") or {}).get(name) or {}
        if "images" in row and _takes(self._tool.create, "images"):
            given = {**given, "create_kwargs": {"images": row["images"], **(given.get("create_kwargs") or {})}}
        return EpisodeTool(self._tool, f"{name}-{next(self._ids)}", given, self.schema, "images" in row)


class EpisodeTool:
    """A tool in one episode: called with the arguments of a call, it returns (text, reward, numbers to log).

    In place of the text are parts, where its response has images.
    """

    def __init__(
        self, tool: Any, instance: str, given: Mapping[str, Any], schema: dict[str, Any], shows_images: bool = False
    ) -> None:
        """shows_images: else those of its responses are left out."""
        self._tool, self._instance, self._given, self._shows_images = tool, instance, given, shows_images
        self._is_created, self._creating = False, asyncio.Lock()
        parameters = schema["function"].get("parameters") or {}
        self._names, self._required = parameters.get("properties") or {}, parameters.get("required") or ()

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raise TypeError where arguments are not those of the schema, whose names need not be Python's."""
        for name in self._required:
            if name not in arguments:
                raise TypeError(f"missing a required argument: {name!r}")
        for name in arguments:
            if name not in self._names:
                raise TypeError(f"got an unexpected keyword argument {name!r}")

    async def __call__(self, /, **arguments: Any) -> tuple[str | list[Any], float, dict[str, Any]]:
        """Execute a call; the first one of an episode creates what it needs, and others of its turn wait for that."""
        async with self._creating:
            if not self._is_created:
                await self._create()
        execute = self._tool.execute
        answer = await settled(execute(self._instance, arguments, **(self._given.get("execute_kwargs") or {})))
        response, reward, numbers = answer if isinstance(answer, tuple) else (answer, 0.0, {})
        text = getattr(response, "text", response)
        said: str | list[Any] = "" if text is None else str(text)
        images = getattr(response, "image", None) if self._shows_images else None
        if images:
            said = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": said}]
        return said, float(reward or 0.0), dict(numbers or {})

    async def _create(self) -> None:
        made, create = self._given.get("create_kwargs") or {}, self._tool.create
        as_one = {"create_kwargs": made} if _takes(create, "create_kwargs") else {}
        created = await settled(create(self._instance, **as_one, **made))
        created = created[0] if isinstance(created, tuple) else created
        self._instance, self._is_created = created if isinstance(created, str) else self._instance, True

    async def release(self) -> None:
        """Let go what the episode has created."""
        if self._is_created:
            await settled(self._tool.release(self._instance, **(self._given.get("release_kwargs") or {})))


def load_class_tools(path: str, key: str) -> dict[str, ClassTool]:
    """Return the tools of a YAML file by name. key: of the path in the configuration.

    Raises ConfigError for a file that cannot be read, a class that cannot be imported, made or used, and a schema that
    has no name.
    """
    tools: dict[str, ClassTool] = {}
    for place, content in enumerate(_entries(path, key)):
        where = f"{key}={path}: tools[{place}]"
        given = content if isinstance(content, Mapping) else {}
        kind, schema = _class(where, given.get("class_name")), given.get("tool_schema")
        try:
            attributes = None if schema is None else json.loads(json.dumps(schema), object_hook=_attributes)
            tool = kind(given.get("config") or {}, attributes)
            if schema is None:
                own = tool.get_openai_tool_schema()
                schema = own if isinstance(own, dict) else own.model_dump(exclude_none=True)
        except Exception as error:
            raise ConfigError(f"{where} cannot be made: {describe_error(error)}") from error
        function = schema.get("function") if isinstance(schema, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ConfigError(f"{where}.tool_schema must have function.name")
        if function["name"] in tools:
            raise ConfigError(f"{where} has the name of another tool, {function['name']}")
        tools[function["name"]] = ClassTool(tool, schema)
    return tools


def _attributes(content: dict[str, Any]) -> ToolSchema:
    return ToolSchema(**content)


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())


def _entries(path: str, key: str) -> list[Any]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise refused(missing_file(key, path, file, (".yaml", ".yml")))
    try:
        content = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}={path} must be a YAML file: {error}") from error
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{key}={path} must have a list `tools`, each with class_name, config and tool_schema")
    return entries


def _class(where: str, name: Any) -> type:
    module, _, last = name.rpartition(".") if isinstance(name, str) else ("", "", "")
    if not module:
        raise ConfigError(f"{where}.class_name={name!r} must be MODULE.CLASS")
    try:
        kind = getattr(importlib.import_module(module), last)
    except Exception as error:
        raise ConfigError(f"{where}.class_name={name} cannot be imported: {describe_error(error)}") from error
    lacking = [method for method in METHODS if not callable(getattr(kind, method, None))]
    if not isinstance(kind, type) or lacking:
        raise ConfigError(f"{where}.class_name={name} must be a class with {', '.join(METHODS)}; it has no {lacking}")
    return kind
