"""Open what answers the policy's turns: the user's environment, and the template that writes observations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from megatron_rl.agents.agent_environment import AgentSource
from megatron_rl.agents.endpoint import EndpointLimits
from megatron_rl.agents.environment_source import (
    ClassSource,
    EnvironmentProcesses,
    EnvironmentsHere,
    EnvironmentSource,
)
from megatron_rl.agents.episode import EpisodeLimits
from megatron_rl.agents.episodes import Episodes, LiveEpisodes
from megatron_rl.agents.observation import TextLimit
from megatron_rl.agents.other_interpreter import InterpreterSource, UnplayedEnvironments
from megatron_rl.agents.tool_parser import ToolParser
from megatron_rl.agents.tools import ToolSource
from megatron_rl.agents.turn_reader import TurnReader
from megatron_rl.agents.turn_renderer import TurnRenderer
from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.config.adapter_files import file_of
from megatron_rl.config.multi_turn import MultiTurnConfig
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.message_form import tool_names
from megatron_rl.data.prompt_images import PromptImages
from megatron_rl.data.template_process import TemplateRefusal
from megatron_rl.errors import ConfigError

KEY = "actor_rollout_ref.rollout.multi_turn"
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "none",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "none"}}},
    },
}
"""A tool that templates and parsers are shown where an agent has not sent its own."""


def with_tools(config: RunConfig) -> RunConfig:
    """Return the configuration whose chat template is given the schemas of the run's tools, if it has some.

    Raises ConfigError for a file without tools, and for one whose types or docstring are missing.
    """
    keys = config.actor_rollout_ref.rollout.multi_turn
    if not config.has_turns or keys.tools_file is None:
        return config
    kwargs = config.data.apply_chat_template_kwargs | {"tools": tool_source(keys).schemas()}
    return replace(config, data=replace(config.data, apply_chat_template_kwargs=kwargs))


def open_episodes(
    config: RunConfig,
    folder: ModelFolder,
    are_chats: set[bool],
    local: bool,
    opened: ExitStack,
    images: PromptImages | None = None,
    is_replay: bool = False,
) -> Episodes | None:
    """Return what answers turns; None where every response is a single turn.

    config: of `with_tools`. folder: of the policy. are_chats: whether prompts are messages, texts, or both. local:
    environments are in this process. images: of prompts and turns; None: they are text. is_replay: turns have their
    replies, and no other interpreter runs. Raises ConfigError for both, for code of the user's that cannot be loaded,
    and for a chat template that does not append messages.
    """
    if not config.has_turns:
        return None
    keys, path, tokenizer = config.actor_rollout_ref.rollout.multi_turn, folder.given, folder.tokenizer
    if len(are_chats) > 1 and not keys.agent.is_set:
        raise ConfigError(f"{KEY}.enable=true needs prompts of one form: some here are messages, some are texts")
    is_chat = keys.agent.is_set or True in are_chats
    if is_chat and tokenizer.chat_template is None:
        raise ConfigError(f"{KEY}.agent needs a chat template, and the tokenizer of {path} has none")
    kwargs, eos = config.data.apply_chat_template_kwargs, folder.end_tokens.ids
    renderer = TurnRenderer(tokenizer, eos, kwargs, is_chat)
    tools = [] if keys.tools_file is None else kwargs["tools"]
    try:
        problem = renderer.append_problem("tool" if tools else "user")
        thoughts, is_unwritten = renderer.thoughts, renderer.unwritten_tools(tools)
    except TemplateRefusal as refusal:
        what = f"the chat template of {path} cannot continue a conversation"
        raise ConfigError(f"{KEY}.enable=true: {what}: {refusal}") from None

    def parser_of(tools: Sequence[Mapping[str, Any]]) -> ToolParser:
        return ToolParser(keys.format, f"{KEY}.format", tokenizer, [dict(tool) for tool in tools], eos, thoughts)

    reader = TurnReader(tokenizer, parser_of, tools, thoughts)
    unread = unread_calls(keys, renderer, parser_of, tools) if tools or keys.agent.is_set else None
    longest = config.data.max_prompt_length + config.data.max_response_length
    environments = open_environments(keys, local, opened, longest, images is not None, is_replay)
    most_images = None if images is None else config.actor_rollout_ref.rollout.limit_images
    turns = keys.max_assistant_turns or config.data.max_response_length
    limits = EpisodeLimits(turns, keys.max_retries, most_images)
    rest = (config.data.max_prompt_length, renderer.appending(), images)
    episodes = LiveEpisodes(environments, renderer, reader, limits, *rest)
    for file in () if images is None else images.files_without:
        what = "its prompts show no image, and turns alone may"
        episodes.notes.append(f"{file} has no column {config.data.image_key!r} (data.image_key): {what}")
    if problem is not None:
        what = "so every turn is a conversation of its own, and data.max_response_length counts its history again"
        episodes.notes.append(f"the chat template of {path} does not append: {problem}; {what}")
    if is_unwritten:
        what = f"the policy cannot see the {len(tools)} tools"
        episodes.notes.append(f"the chat template of {path} writes no tools: {what}")
    if unread is not None:
        episodes.notes.append(f"the chat template of {path}: {unread}")
    return episodes


def unread_calls(
    keys: MultiTurnConfig,
    renderer: TurnRenderer,
    parser_of: Callable[[Sequence[Mapping[str, Any]]], ToolParser],
    tools: Sequence[Mapping[str, Any]],
) -> str | None:
    """Return why calls would not be read, or None. Raises ConfigError for a format that cannot be loaded; for an agent,
    which may have no tools, only if it is not the default.
    """
    try:
        parser = parser_of(tools or [PROBE_TOOL])
    except ConfigError as error:
        if tools or keys.format != MultiTurnConfig().format:
            raise
        return f"an agent that sends tools would end the run: {error}"
    name = next(iter(tool_names(tools or [PROBE_TOOL])), "")
    written = renderer.written_call(name)
    if not written or any(call.name == name for call in parser.turn(renderer.ids(written)).calls):
        return None
    return f"{KEY}.format={keys.format} does not read a call as the template writes it: {written[:80]!r}"


def open_environments(
    keys: MultiTurnConfig,
    local: bool,
    opened: ExitStack,
    num_tokens: int,
    reads_images: bool = False,
    is_replay: bool = False,
) -> EnvironmentsHere | EnvironmentProcesses | UnplayedEnvironments:
    """Return environments in this process (local), or start processes for them. num_tokens: of a conversation.
    reads_images: which may show images.

    Raises ConfigError where the user's code cannot be loaded.
    """
    source = environment_source(keys, num_tokens, reads_images)
    if is_replay and isinstance(source, InterpreterSource):
        return source.unplayed()
    host = source.host()
    if local:
        return opened.enter_context(EnvironmentsHere(host))
    asyncio.run(host.close())
    # Tools and agents have limits of their own, which end first and cost no other episode its process.
    is_agent = isinstance(source, InterpreterSource) and source.is_agent
    own_limits = 1 if isinstance(source, ClassSource | InterpreterSource) and not is_agent else 2
    return opened.enter_context(
        EnvironmentProcesses(source, keys.num_workers, own_limits * keys.tool_timeout_s, host.opens, host.hears_cuts)
    )


def environment_source(keys: MultiTurnConfig, num_tokens: int, reads_images: bool = False) -> EnvironmentSource:
    """Return where environments come from: the user's class, tools or agent."""
    own, agent = keys.environment, keys.agent
    bounds = (agent.max_request_bytes, agent.max_open, agent.idle_timeout_s)
    limits = EndpointLimits(num_tokens, reads_images, *bounds)
    if keys.python is not None:
        kind, chosen = ("agent", agent) if agent.is_set else ("environment", own)
        assert chosen.path is not None  # refused with the configuration
        place = f"{KEY}.{kind}.path"
        return InterpreterSource(
            python=keys.python,
            python_key=f"{KEY}.python",
            path=chosen.path,
            key=place,
            name=chosen.name,
            kwargs=chosen.kwargs,
            limit=text_limit(keys),
            timeout_s=keys.tool_timeout_s,
            is_agent=agent.is_set,
            endpoint_limits=limits,
            reads_images=reads_images,
        )
    if agent.is_set:
        command, timeout_s = tuple(agent.command or ()), keys.tool_timeout_s
        path = agent.path and file_of(agent.path, f"{KEY}.agent.path")
        return AgentSource(path, agent.name, f"{KEY}.agent.path", command, timeout_s, limits, agent.kwargs)
    if keys.tools_file is not None:
        return replace(tool_source(keys), reads_images=reads_images)
    assert own.path is not None  # the configuration's rules
    place = f"{KEY}.environment.path"
    return ClassSource(file_of(own.path, place), own.name, place, own.kwargs, text_limit(keys), reads_images)


def tool_source(keys: MultiTurnConfig) -> ToolSource:
    """Return where tools come from, which there must be."""
    assert keys.tools_file is not None
    key, path = keys.tools_file
    limits = (keys.max_parallel_calls, keys.tool_timeout_s, keys.tool_rewards, text_limit(keys))
    return ToolSource(path, f"{KEY}.{key}", key == "tool_config_path", *limits)


def text_limit(keys: MultiTurnConfig) -> TextLimit:
    """Return the limit of messages."""
    return TextLimit(keys.max_tool_response_length, keys.tool_response_truncate_side)
