"""What the policy has said in a turn, from its tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.agents.observation import Turn
from megatron_rl.agents.thoughts import PLAIN, Thoughts
from megatron_rl.agents.tool_parser import ToolParser, without_special
from megatron_rl.plain_values import describe_error

Schemas = Sequence[dict[str, Any]]

MOST_PARSERS = 64
"""Parsers that are kept: an agent may send other tools with each request."""


class TurnReader:
    """Reads turns: as text, with calls where the policy has tools, and apart from its thoughts.

    parser_of: makes the parser of calls, from the schemas of the tools. It is called when the first turn with these
    tools is read, and raises ConfigError where there is no such parser. tools: of all episodes; an episode that begins
    with its own has those. thoughts: how the policy thinks.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        parser_of: Callable[[Schemas], ToolParser] | None = None,
        tools: Schemas = (),
        thoughts: Thoughts = PLAIN,
    ) -> None:
        self._tokenizer, self._parser_of, self._tools, self._thoughts = tokenizer, parser_of, tools, thoughts
        self._parsers: dict[str, ToolParser] = {}
        if tools:
            self._parser(tools)

    def turn(self, token_ids: Sequence[int], tools: Schemas = ()) -> Turn:
        """Return a turn, without the token that ended it and other special tokens. tools: of its episode."""
        tools = tools or self._tools
        if tools:
            return self._parser(tools).turn(token_ids)
        if not self._thoughts.is_known:
            return Turn(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
        said = self._thoughts.read(self._tokenizer.decode(list(token_ids)))
        thought, text = (without_special(each, self._tokenizer) for each in (said.thought, said.rest))
        return Turn(text, reasoning_content=thought)

    def text_of(self, token_id: int) -> str:
        """Return a token as text, special ones too."""
        text: str = self._tokenizer.decode([token_id])
        return text

    def _parser(self, tools: Schemas) -> ToolParser:
        name = json.dumps(list(tools), sort_keys=True)
        if name not in self._parsers:
            if len(self._parsers) >= MOST_PARSERS:
                del self._parsers[next(iter(self._parsers))]
            self._parsers[name] = self._made(tools)
        return self._parsers[name]

    def _made(self, tools: Schemas) -> ToolParser:
        """Raises ConfigError where the format does not go without tools either, else ValueError: then it is these."""
        assert self._parser_of is not None  # who gives tools gives their parser
        try:
            return self._parser_of(tools)
        except Exception as error:  # pydantic and vLLM raise many kinds for schemas that an agent has sent
            self._parser_of(())
            raise ValueError(f"no parser of calls reads these tools: {describe_error(error)}") from error
