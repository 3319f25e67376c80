"""Conversations and observations as tokens, exactly as the tokenizer's chat template joins them.

The tokens that were sampled are kept; nothing is rendered a second time. What follows a turn is rendered behind a
synthetic conversation whose last message is the policy's, with the calls that the messages answer, and only what the
template writes after that message is tokenised. Where a template does not append (`append_problem` says why), every
turn is a conversation of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.agents.observation import FOLLOWING, InitialConversation, Message, Turn
from megatron_rl.agents.thoughts import ThoughtMarks, Thoughts, thoughts_of
from megatron_rl.data.message_form import (
    ANSWER,
    QUESTION,
    THOUGHT,
    TOOL,
    VALUE,
    call,
    named_id,
    thought_marks,
    tool_names,
)
from megatron_rl.data.template_process import RenderLimits, TemplateProcess, TemplateRefusal, rendered, template_of

LIMITS = RenderLimits(cpu_s=2.0, memory_bytes=1 << 30)
"""Of the template at one turn, which takes milliseconds; the run waits for it."""
NO_LIMIT = 1 << 62
CHARACTERS, SLACK = 8, 64
"""Characters of a long text that are tokenised first, for each token that may be; tokens that a text may lose where it
is not cut.
"""
Rendering = tuple[list[Message], dict[str, Any]]
"""A conversation, and further variables of the template."""


class NotAppended(TemplateRefusal):
    """The chat template renders earlier turns differently once more messages follow, so turns cannot be appended."""


class TurnRenderer:
    """Renders what the policy reads next. Without a template, texts are joined as they are.

    The template is rendered in a process with limits: it may do anything at what others write. `most` of methods: no
    more tokens are needed; of a text that has more, the first ones are returned, more than `most`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Sequence[int],
        template_kwargs: Mapping[str, Any] | None = None,
        is_chat: bool = True,
        limits: RenderLimits = LIMITS,
    ) -> None:
        """eos_token_ids: tokens that end a turn. template_kwargs: further variables of the template, such as tools.
        is_chat: whether prompts are messages. limits: of the template. Raises ConfigError where the tokenizer has no
        default template.
        """
        self._tokenizer, self._eos = tokenizer, frozenset(eos_token_ids)
        self._ends = [text for text in tokenizer.convert_ids_to_tokens(sorted(self._eos)) if isinstance(text, str)]
        self._template: str | None = None
        self._variables: dict[str, Any] = {**tokenizer.special_tokens_map, **(template_kwargs or {})}
        if is_chat:
            self._template, self._variables = template_of(tokenizer, self._variables)
        self._process = TemplateProcess(partial(_texts, self._template or "", self._variables), limits)
        self._rendering = threading.Lock()

    @cached_property
    def thoughts(self) -> Thoughts:
        """How the policy thinks. Raises TemplateRefusal where the template refuses a question."""
        prompt = "" if self._template is None else self._render([QUESTION], add_generation_prompt=True)
        return thoughts_of(self._template, prompt)

    def beginning(self, opening: InitialConversation, most: int = NO_LIMIT) -> list[int]:
        """Return the tokens of a conversation with which an episode begins, up to the first turn.

        Raises TemplateRefusal where the template refuses it.
        """
        if self._template is None:
            return self.ids("".join(message["content"] for message in opening.messages), most)
        tools = {"tools": list(opening.tools)} if opening.tools else {}
        return self.ids(self._render(opening.messages, **tools, add_generation_prompt=True), most)

    def following(
        self,
        messages: Sequence[Message],
        last_token: int,
        turn: Turn | None = None,
        num_calls: int = 0,
        most: int = NO_LIMIT,
    ) -> list[int]:
        """Return the tokens between a turn and the next one: the rest of its end, the messages, and the beginning of
        a response.

        last_token: of the turn. Where it is the end mark that the template writes, the mark is not written again.
        turn: whose calls the messages answer. num_calls: calls of the conversation before the turn.
        Raises TemplateRefusal where the template refuses the messages or does not append them.
        """
        if self._template is None:
            return self.ids("".join(message["content"] for message in messages), most)
        names = [each.name for each in turn.calls] if turn is not None else []
        after = self.after_answer([QUESTION], messages, names, num_calls)
        ids = self.ids(after, most + 1)
        return ids[1:] if ids[:1] == [last_token] and last_token in self._eos else ids

    def after_answer(
        self, before: Sequence[Message], messages: Sequence[Message], names: Sequence[str] = (), num_calls: int = 0
    ) -> str:
        """Return what the template writes after a response that follows `before`, where `messages` follow the response.

        names: of the tools that the answer calls. num_calls: calls of the conversation before the response. Raises
        TemplateRefusal.
        """
        answer, messages = self._answer_before(messages, names, num_calls)
        prompt = {"add_generation_prompt": True}
        text, start = self._rendered(([*before, answer, *messages], prompt), (list(before), prompt))
        place = _said(text)
        end = self._end_of_call(text, place, [*before, answer]) if answer.get("tool_calls") else place
        if end is None or place < 0 or not text.startswith(start):
            raise NotAppended("it writes an earlier turn of the assistant otherwise once other messages follow")
        return text[end:]

    def appending(self) -> set[str]:
        """Return the roles whose messages the template appends, of those that may follow a turn."""
        roles = set()
        for role in FOLLOWING:
            with suppress(TemplateRefusal):
                roles |= {role} if self.append_problem(role) is None else set()
        return roles

    def append_problem(self, role: str) -> str | None:
        """Return why messages of a role cannot be appended to a conversation token by token; None if they can.

        Raises TemplateRefusal where the template refuses them, or leaves them out.
        """
        if self._template is None:
            return None
        message: Message = {"role": role, "content": QUESTION["content"][::-1]}
        answer, (message,) = self._answer_before([message])
        first = self._render([QUESTION, answer, message], add_generation_prompt=True)
        if message["content"] not in first:
            raise TemplateRefusal(f"it does not write messages of role {role}")
        again, _ = self._answer_before([message], num_calls=1)
        second = self._render([QUESTION, answer, message, again, message], add_generation_prompt=True)
        try:
            self.after_answer([QUESTION], [message])
        except NotAppended as problem:
            return str(problem)
        if not second.startswith(first):
            return f"it does not write a message of role {role} as an addition to the conversation before it"
        return self._thought_problem(answer, message)

    def unwritten_tools(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the template writes the name of none of these tools, so that the policy cannot see them."""
        names = tool_names(tools)
        if self._template is None or not names:
            return bool(names)
        text = self._render([QUESTION], tools=list(tools), add_generation_prompt=True)
        return not any(name in text for name in names)

    def written_call(self, name: str) -> str:
        """Return a turn that calls a tool as the template writes it; "" where it writes no calls."""
        if self._template is None or not self._writes_calls:
            return ""
        answer, _ = self._answer_before([{"role": "tool", "content": ""}], [name])
        alone = self._render([QUESTION, answer], add_generation_prompt=False)
        start = self._render([QUESTION], add_generation_prompt=True)
        end = self._end_of_call(alone, _said(alone), [QUESTION, answer])
        return alone[len(commonprefix([start, alone])) : end]

    def _thought_problem(self, answer: Message, message: Message) -> str | None:
        """Why a turn with a thought is not kept as it was sampled; None if it is, or if the template knows none."""
        assert self._template is not None  # callers ask
        thinking = answer | {"reasoning_content": THOUGHT}
        try:
            alone = self._render([QUESTION, thinking], add_generation_prompt=False)
            text = self._render([QUESTION, thinking, message], add_generation_prompt=True)
        except TemplateRefusal as refusal:
            return f"it refuses the thinking of a turn: {refusal}"
        if THOUGHT in alone and not text.startswith(alone[: _said(alone)]):
            return "it drops the thinking of earlier turns"
        if thought_marks(self._template) is not None and THOUGHT not in text:
            return "it does not write the thinking of a turn"
        return None

    def _answer_before(
        self, messages: Sequence[Message], names: Sequence[str] = (), num_calls: int = 0
    ) -> tuple[Message, list[Message]]:
        """The policy's message that messages may follow, and the messages without ids, which are those of its calls.

        Results of tools need a call each before them, even where a turn's calls could not be read.
        """
        answer: Message = {"role": "assistant", "content": ANSWER}
        if isinstance(self.thoughts, ThoughtMarks) and self.thoughts.is_open:
            answer["reasoning_content"] = THOUGHT  # without one, a template may close what the prompt has opened
        results = [message for message in messages if message["role"] == "tool"]
        if not results or not self._writes_calls:
            return answer, list(messages)
        own = list(names) if len(names) >= len(results) else [str(each.get("name") or TOOL) for each in results]
        calls = [call(VALUE, name=name) | {"id": named_id(name, num_calls + n)} for n, name in enumerate(own)]
        without = [{name: value for name, value in each.items() if name != "tool_call_id"} for each in messages]
        return answer | {"content": "", "tool_calls": calls}, without

    @cached_property
    def _writes_calls(self) -> bool:
        """Whether the template writes calls. One that does not may write their results all the same."""
        answer = {"role": "assistant", "content": "", "tool_calls": [call(VALUE)]}
        try:
            return VALUE in self._render([QUESTION, answer], add_generation_prompt=False)
        except TemplateRefusal:
            return False

    def _end_of_call(self, text: str, place: int, conversation: Sequence[Message]) -> int | None:
        """Where the last call of a conversation ends in a longer text: at the mark that ends the turn, or, where the
        tokens that end a turn are not written, where the text of the conversation alone does. place: inside the call.
        """
        ends = [found for end in self._ends if (found := text.find(end, place)) >= 0]
        if ends:
            return min(ends)
        plain: list[Message] = [*conversation[:-1], {"role": "assistant", "content": ANSWER}]
        alone, mark = (
            known[_said(known) :]
            for known in (self._render(each, add_generation_prompt=False) for each in (conversation, plain))
        )
        alone = alone.removesuffix(mark)
        return place + len(alone) if text.startswith(alone, place) else None

    def _render(self, messages: Sequence[Message], **options: Any) -> str:
        return self._rendered((list(messages), options))[0]

    def _rendered(self, *renderings: Rendering) -> list[str]:
        """The texts of conversations, for one reply of the process. Raises TemplateRefusal."""
        assert self._template is not None  # callers ask
        with self._rendering:
            texts = self._process.map(renderings)
        for text in texts:
            if isinstance(text, TemplateRefusal):
                raise text
        return [str(text) for text in texts]

    def ids(self, text: str, most: int = NO_LIMIT) -> list[int]:
        """Return the tokens of a text that a template has written.

        A tokenizer takes a minute for 14 MB, so a long text is tokenised from its start until it is known to have more
        than `most`.
        """
        length = CHARACTERS * (most + SLACK)
        while length < len(text):
            first = self._tokens(text[:length])
            if len(first) > most + most // 8 + SLACK:
                return first
            length *= 4
        return self._tokens(text)

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return ids


def _texts(template: str, variables: dict[str, Any], items: Sequence[Rendering]) -> list[str | TemplateRefusal]:
    return [rendered(template, variables | options, [messages])[0] for messages, options in items]


def _said(text: str) -> int:
    """Where the last response or argument of the policy ends in a text; -1 if it does not exist."""
    places = [text.rfind(said) + len(said) for said in (ANSWER, VALUE) if said in text]
    return max(places, default=-1)
