"""Open what answers the policy's turns: the user's environment, and the template that writes observations."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from megatron_rl.agents import tools
from megatron_rl.agents.environment_source import EnvironmentProcesses, EnvironmentsHere, EnvironmentSource
from megatron_rl.agents.episodes import Episodes, LiveEpisodes
from megatron_rl.agents.observation import TextLimit
from megatron_rl.agents.tool_parser import ToolParser
from megatron_rl.agents.turn_renderer import TurnRenderer
from megatron_rl.config.multi_turn import MultiTurnConfig
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import ConfigError
from megatron_rl.roles.rollout import eos_token_ids

KEY = "actor_rollout_ref.rollout.multi_turn"
TOOLS_FILE = tools.__file__


def with_tools(config: RunConfig) -> RunConfig:
    """Return the configuration whose chat template is given the schemas of the run's tools, if it has some.

    Raises ConfigError for a file without tools, and for one whose types or docstring are missing.
    """
    path, key = config.actor_rollout_ref.rollout.multi_turn.function_tool_path, f"{KEY}.function_tool_path"
    if not config.has_turns or path is None:
        return config
    kwargs = config.data.apply_chat_template_kwargs | {"tools": tools.schemas_of(tools.load_tools(path, key), key)}
    return replace(config, data=replace(config.data, apply_chat_template_kwargs=kwargs))


def open_episodes(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, are_chats: set[bool], local: bool, opened: ExitStack
) -> Episodes | None:
    """Return what answers turns; None where every answer is a single turn.

    config: of `with_tools`. are_chats: whether prompts are messages, texts, or both. local: environments are in this
    process. Raises ConfigError for both, for code of the user's that cannot be loaded, and for a chat template that
    does not append messages.
    """
    if not config.has_turns:
        return None
    if len(are_chats) > 1:
        raise ConfigError(f"{KEY}.enable=true needs prompts of one form: some here are messages, some are texts")
    keys, path = config.actor_rollout_ref.rollout.multi_turn, config.actor_rollout_ref.model.path
    kwargs, eos = config.data.apply_chat_template_kwargs, eos_token_ids(path)
    renderer = TurnRenderer(tokenizer, eos, kwargs, is_chat=True in are_chats)
    problem = renderer.append_problem("user" if keys.function_tool_path is None else "tool")
    if problem is not None:
        raise ConfigError(f"{KEY}.enable=true: the chat template of {path} cannot go on with a conversation: {problem}")
    source, parser = environment_source(keys), None
    if keys.function_tool_path is not None:
        parser = ToolParser(keys.format, f"{KEY}.format", tokenizer, kwargs["tools"], eos)
    here = EnvironmentsHere(source.host()) if local else None
    environments = here or opened.enter_context(EnvironmentProcesses(source, keys.num_workers, source_timeout_s(keys)))
    return LiveEpisodes(environments, renderer, keys.max_assistant_turns or config.data.max_response_length, parser)


def environment_source(keys: MultiTurnConfig) -> EnvironmentSource:
    """Return where environments come from: the user's class, or the one that calls the user's tools.

    Raises ConfigError where it cannot be loaded.
    """
    limit = TextLimit(keys.max_tool_response_length, keys.tool_response_truncate_side)
    own, tool_path = keys.environment, keys.function_tool_path
    if tool_path is None:
        assert own.path is not None  # the configuration's rules
        source = EnvironmentSource(own.path, own.name, f"{KEY}.environment.path", own.kwargs, limit)
    else:
        key, limits = f"{KEY}.function_tool_path", (keys.max_parallel_calls, keys.tool_timeout_s)
        kwargs = dict(zip(("path", "key", "max_calls", "timeout_s"), (tool_path, key, *limits), strict=True))
        source = EnvironmentSource(TOOLS_FILE, "ToolEnvironment", key, kwargs, limit)
    source.host()
    return source


def source_timeout_s(keys: MultiTurnConfig) -> float:
    """Seconds that a process may take for one turn. Tools have limits of their own, which end first."""
    return keys.tool_timeout_s * (1 if keys.function_tool_path is None else 2)
