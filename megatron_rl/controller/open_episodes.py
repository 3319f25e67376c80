"""Open what answers the policy's turns: the user's environment, and the template that writes observations."""

from __future__ import annotations

from contextlib import ExitStack

from transformers import PreTrainedTokenizerBase

from megatron_rl.agents.environment_source import EnvironmentProcesses, EnvironmentsHere, EnvironmentSource
from megatron_rl.agents.episodes import Episodes, LiveEpisodes
from megatron_rl.agents.observation import TextLimit
from megatron_rl.agents.turn_renderer import TurnRenderer
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import ConfigError
from megatron_rl.roles.rollout import eos_token_ids

KEY = "actor_rollout_ref.rollout.multi_turn"


def open_episodes(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, are_chats: set[bool], local: bool, opened: ExitStack
) -> Episodes | None:
    """Return what answers turns; None where every answer is a single turn.

    are_chats: whether prompts are messages, texts, or both. local: environments are in this process. Raises ConfigError
    for both, for an environment that cannot be loaded, and for a chat template that does not append messages.
    """
    if not config.has_turns:
        return None
    if len(are_chats) > 1:
        raise ConfigError(f"{KEY}.enable=true needs prompts of one form: some here are messages, some are texts")
    keys, path = config.actor_rollout_ref.rollout.multi_turn, config.actor_rollout_ref.model.path
    kwargs = config.data.apply_chat_template_kwargs
    renderer = TurnRenderer(tokenizer, eos_token_ids(path), kwargs, is_chat=True in are_chats)
    problem = renderer.append_problem("user")
    if problem is not None:
        raise ConfigError(f"{KEY}.enable=true: the chat template of {path} cannot go on with a conversation: {problem}")
    limit = TextLimit(keys.max_tool_response_length, keys.tool_response_truncate_side)
    own = keys.environment
    assert own.path is not None  # the configuration's rules
    source = EnvironmentSource(own.path, own.name, f"{KEY}.environment.path", own.kwargs, limit)
    host = source.host()
    here = EnvironmentsHere(host) if local else None
    environments = here or opened.enter_context(EnvironmentProcesses(source, keys.num_workers, keys.tool_timeout_s))
    return LiveEpisodes(environments, renderer, keys.max_assistant_turns or config.data.max_response_length)
