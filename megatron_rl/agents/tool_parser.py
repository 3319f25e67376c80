"""Tool calls in what a policy has said, read by vLLM's parsers, which know each model's format."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.agents.observation import ToolCall, Turn
from megatron_rl.config.problems import nearest_name
from megatron_rl.errors import ConfigError


class ToolParser:
    """Reads turns in one format, such as hermes; `eos_token_ids` end them."""

    def __init__(
        self,
        name: str,
        key: str,
        tokenizer: PreTrainedTokenizerBase,
        schemas: Sequence[dict[str, Any]],
        eos_token_ids: Sequence[int],
    ) -> None:
        """key: of the format in the configuration. Raises ConfigError for a format that vLLM does not know, and for one
        that does not go with the tokenizer.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
        from vllm.tool_parsers import ToolParserManager

        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)  # else a traceback for each unreadable call
        known = sorted(ToolParserManager.list_registered())
        if name not in known:
            raise ConfigError(
                f"{key}={name} must be a format of vLLM's tool parsers; nearest: {nearest_name(name, known)}"
            )
        tools = [ChatCompletionToolsParam(**schema) for schema in schemas]
        self._request = ChatCompletionRequest(messages=[], model="", tools=tools)
        try:
            self._parser = ToolParserManager.get_tool_parser(name)(tokenizer, tools)
        except (RuntimeError, ValueError, KeyError, ImportError) as error:
            raise ConfigError(f"{key}={name} does not go with this tokenizer: {error}") from error
        self._tokenizer, self._eos = tokenizer, frozenset(eos_token_ids)

    def turn(self, token_ids: Sequence[int]) -> Turn:
        """Return a turn with its calls; a call that cannot be read is a problem of the turn."""
        ids = list(token_ids[:-1]) if token_ids and token_ids[-1] in self._eos else list(token_ids)
        text: str = self._tokenizer.decode(ids)
        read = self._parser.extract_tool_calls(text, self._request)
        calls, problem = [], ""
        for call in read.tool_calls:
            try:
                arguments = json.loads(call.function.arguments)
            except ValueError as error:
                problem = f"Error: the arguments of {call.function.name} are no JSON: {error}"
                continue
            if isinstance(arguments, dict):
                calls.append(ToolCall(call.function.name, arguments))
            else:
                problem = f"Error: the arguments of {call.function.name} must be an object"
        if not read.tool_calls and self._begins_a_call(text):
            problem = "Error: this call cannot be read"
        return Turn(text if not read.tools_called else read.content or "", tuple(calls), problem)

    def _begins_a_call(self, text: str) -> bool:
        starts = (getattr(self._parser, name, None) for name in ("tool_call_start_token", "bot_token"))
        return any(isinstance(start, str) and start and start in text for start in starts)
