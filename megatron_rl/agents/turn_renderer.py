"""Openings and observations as tokens, exactly as the tokenizer's chat template joins them.

The tokens that were drawn are kept; nothing is rendered a second time. What follows a turn is rendered behind a
synthetic conversation whose last message is the policy's, and only what the template writes after that message is
tokenised. Where a template does not append (`append_problem` says why), every turn is a conversation of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.agents.observation import Message, Opening
from megatron_rl.data.template_process import TemplateRefusal, rendered

QUESTION = {"role": "user", "content": "40817263951"}
ANSWER = "73920485162"
"""Texts that templates write unchanged."""


class NotAppended(TemplateRefusal):
    """A template writes what was said otherwise once other messages follow."""


class TurnRenderer:
    """Renders what the policy reads next. Without a template, texts are joined as they are."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Sequence[int],
        template_kwargs: Mapping[str, Any] | None = None,
        is_chat: bool = True,
    ) -> None:
        """eos_token_ids: tokens that end a turn. template_kwargs: further variables of the template, such as tools.
        is_chat: whether prompts are messages.
        """
        self._tokenizer, self._eos = tokenizer, frozenset(eos_token_ids)
        self._variables = {**tokenizer.special_tokens_map, **(template_kwargs or {})}
        tools = self._variables.get("tools")
        self._template: str | None = tokenizer.get_chat_template(tools=tools) if is_chat else None

    def beginning(self, opening: Opening) -> list[int]:
        """Return the tokens of a conversation with which an episode begins, up to the first turn.

        Raises TemplateRefusal where the template refuses it.
        """
        if self._template is None:
            return self._ids("".join(message["content"] for message in opening.messages))
        tools = {"tools": list(opening.tools)} if opening.tools else {}
        return self._ids(self._render(opening.messages, **tools, add_generation_prompt=True))

    def following(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """Return the tokens between a turn and the next one: the rest of its end, the messages, and the beginning of
        an answer.

        last_token: of the turn. Where it is the end mark that the template writes, the mark is not written again.
        Raises TemplateRefusal where the template refuses the messages or does not append them.
        """
        if self._template is None:
            return self._ids("".join(message["content"] for message in messages))
        after = self.after_answer([QUESTION], messages)
        ids = self._ids(after)
        return ids[1:] if ids[:1] == [last_token] and last_token in self._eos else ids

    def after_answer(self, before: Sequence[Message], messages: Sequence[Message]) -> str:
        """Return what the template writes after an answer that follows `before`, where `messages` follow the answer.

        Raises TemplateRefusal.
        """
        answered = [*before, {"role": "assistant", "content": ANSWER}]
        text = self._render([*answered, *messages], add_generation_prompt=True)
        start = self._render(list(before), add_generation_prompt=True)
        place = text.find(ANSWER)
        if place < 0 or not text.startswith(start):
            raise NotAppended("it writes an earlier turn of the assistant otherwise once other messages follow")
        return text[place + len(ANSWER) :]

    def append_problem(self, role: str) -> str | None:
        """Return why messages of a role cannot be appended to a conversation token by token; None if they can.

        Raises TemplateRefusal where the template refuses them, or leaves them out.
        """
        if self._template is None:
            return None
        message = {"role": role, "content": QUESTION["content"][::-1]}
        conversation: list[Message] = [QUESTION, {"role": "assistant", "content": ANSWER}, message]
        first = self._render(conversation, add_generation_prompt=True)
        if message["content"] not in first:
            raise TemplateRefusal(f"it does not write messages of role {role}")
        answered: list[Message] = [*conversation, {"role": "assistant", "content": ANSWER}]
        second = self._render([*answered, message], add_generation_prompt=True)
        try:
            self.after_answer([QUESTION], [message])
        except NotAppended as problem:
            return str(problem)
        if not second.startswith(first):
            return f"it does not write a message of role {role} as an addition to the conversation before it"
        return None

    def _render(self, messages: Sequence[Message], **options: Any) -> str:
        assert self._template is not None  # callers ask
        text = rendered(self._template, self._variables | options, [list(messages)])[0]
        if isinstance(text, TemplateRefusal):
            raise text
        return text

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return ids
