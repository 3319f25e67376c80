"""Tool calls in what a policy has said, read by vLLM's parsers, which know each model's format.

A parser is given what follows the thought of a turn, as in vLLM's server: a call inside of a thought is no call. Calls
of gpt-oss are messages to a channel of their own, and are read with the channels; vLLM's parser of them needs a
vocabulary that it fetches from the network.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.agents.observation import ToolCall, Turn
from megatron_rl.agents.thoughts import PLAIN, Channels, Said, Thoughts
from megatron_rl.config.problems import nearest_name
from megatron_rl.errors import ConfigError
from megatron_rl.plain_values import strict_json

CHANNELS = "openai"
"""The format of gpt-oss."""
STARTS = ("tool_call_start_token", "bot_token", "tool_calls_start_token")
"""Attributes of vLLM's parsers that hold the mark with which a call begins."""


class ToolParser:
    """Reads turns in one format, such as hermes; `eos_token_ids` end them. thoughts: how the policy thinks."""

    def __init__(
        self,
        name: str,
        key: str,
        tokenizer: PreTrainedTokenizerBase,
        schemas: Sequence[dict[str, Any]],
        eos_token_ids: Sequence[int],
        thoughts: Thoughts = PLAIN,
    ) -> None:
        """key: of the format in the configuration. Raises ConfigError for a format that vLLM does not know, for one
        that does not go with the tokenizer or the chat template, and for one whose package is not installed.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
        from vllm.tool_parsers import ToolParserManager

        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)  # else a traceback for each unreadable call
        known = sorted(ToolParserManager.list_registered())
        if name not in known:
            raise ConfigError(
                f"{key}={name} must be a format of vLLM's tool parsers; did you mean: {nearest_name(name, known)}"
            )
        tools = [ChatCompletionToolsParam(**schema) for schema in schemas]
        self._request = ChatCompletionRequest(messages=[], model="", tools=tools)
        try:
            self._parser = ToolParserManager.get_tool_parser(name)(tokenizer, tools)
        except ImportError as error:
            raise ConfigError(
                f"{key}={name} needs the package {error.name}, which is not installed; try: pip install {error.name}"
            ) from error
        except (RuntimeError, ValueError, KeyError) as error:
            raise ConfigError(f"{key}={name} does not go with this tokenizer: {error}") from error
        if isinstance(thoughts, Channels) != (name == CHANNELS):
            needs = (
                f"{key}={CHANNELS}" if isinstance(thoughts, Channels) else "one that writes channels, as gpt-oss does"
            )
            raise ConfigError(f"{key}={name} does not go with this chat template; it needs {needs}")
        self._tokenizer, self._eos, self._thoughts = tokenizer, frozenset(eos_token_ids), thoughts

    def turn(self, token_ids: Sequence[int]) -> Turn:
        """Return a turn with its calls; a call that cannot be read is a problem of the turn."""
        ids = list(token_ids[:-1]) if token_ids and token_ids[-1] in self._eos else list(token_ids)
        text: str = self._tokenizer.decode(ids)
        said = self._thoughts.read(text)
        rest, found = self._calls(said)
        calls, problem = [], ""
        for name, given in found:
            try:
                arguments = strict_json(given)
            except ValueError as error:
                problem = f"Error: the arguments of {name} are no JSON: {error}"
                continue
            if isinstance(arguments, dict):
                calls.append(ToolCall(name, arguments))
            else:
                problem = f"Error: the arguments of {name} must be an object"
        if not found and self._begins_a_call(said.rest):
            problem = "Error: this call cannot be read"
        if not self._thoughts.is_known:
            return Turn(text.removesuffix(said.rest) + rest, tuple(calls), problem)
        thought, rest = (without_special(each, self._tokenizer) for each in (said.thought, rest))
        return Turn(rest, tuple(calls), problem, reasoning_content=thought)

    def _calls(self, said: Said) -> tuple[str, Sequence[tuple[str, str]]]:
        """What was said next to calls, and the calls: name and arguments as JSON text."""
        if isinstance(self._thoughts, Channels):
            return said.rest, said.calls
        read = self._parser.extract_tool_calls(said.rest, self._request)
        calls = [(str(call.function.name), str(call.function.arguments)) for call in read.tool_calls]
        return (read.content or "") if read.tools_called else said.rest, calls

    def _begins_a_call(self, text: str) -> bool:
        starts = [getattr(self._parser, name, None) for name in STARTS]
        engine = getattr(self._parser, "_parser_engine", None)
        if engine is not None:
            starts.append(engine.parser_engine_config.terminal_literal("TOOL_START"))
        return any(isinstance(start, str) and start and start in text for start in starts)


def without_special(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a text without the tokenizer's special tokens."""
    for token in tokenizer.all_special_tokens:
        text = text.replace(token, "")
    return text
