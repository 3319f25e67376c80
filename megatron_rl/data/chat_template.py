"""Conversations as text with the assistant's turns marked, exactly as the tokenizer's template writes them.

The part of a turn that the model generates counts. It begins after the prompt of its generation (the messages before,
with the generation prompt) and ends before the next message. The end mark counts, blanks after the end token do not
(`tokens.Encoder`). If the template has {% generation %} marks, these decide.

Some templates rewrite a turn once later turns follow, such as without its thinking. The turn is then learned in a text
of its own, in which it is the last, as it was when it was generated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_rl.data.example_rows import Chat, Text
from megatron_rl.data.image_sources import num_images
from megatron_rl.data.message_form import ANSWER, TOOL, VALUE, call, unwritten_fields
from megatron_rl.data.messages import Message
from megatron_rl.data.row_problems import RowProblem
from megatron_rl.data.template_process import TemplateRefusal, adapted, checked_length, refusable, template_of
from megatron_rl.errors import ConfigError

Span = tuple[int, int]
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROBE = "61520394817"
"""A response that templates write unchanged, and that occurs nowhere else in a conversation."""


@dataclass(frozen=True)
class Draft:
    """A text and the characters in it that count. spans: of these, in order. prompt_end: characters before the first
    response that counts. is_plain: no template wrote it, so the tokenizer's special tokens go before it. is_open:
    nothing ends the last response. is_altered: the text has a response in another form than the file. unwritten: fields
    of the responses, and `tools`, that the file has and the text does not. ending: the end token of an open last
    response, with which the next message would begin; "": the tokenizer's. num_images: images that the text shows.
    """

    text: str
    spans: tuple[Span, ...]
    prompt_end: int
    is_plain: bool
    is_open: bool
    is_altered: bool = False
    unwritten: tuple[str, ...] = ()
    ending: str = ""
    num_images: int = 0


def plain_draft(text: Text, loss_on: str) -> Draft:
    """A plain prompt and its response, or plain text alone, unchanged."""
    whole = text.prompt + text.answer
    start = 0 if loss_on == "all" else len(text.prompt)
    return Draft(whole, ((start, len(whole)),), start, is_plain=True, is_open=True)


class ChatTemplate:
    """Renders conversations with the chat template of a tokenizer."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any], end_token_ids: Sequence[int] = ()
    ):
        """kwargs: further variables of the template. end_token_ids: at which generation stops. Raises ConfigError if
        the tokenizer has no template, or several and no default.
        """
        if tokenizer.chat_template is None:
            raise ConfigError(
                "the data has chat messages, but the tokenizer has no chat_template: add one to the model folder, "
                "or store prompts and responses as plain text"
            )
        template, own = template_of(tokenizer, kwargs)
        self._templates = {False: template, True: template_of(tokenizer, {"tools": [{}], **kwargs})[0]}
        self._variables = {**tokenizer.special_tokens_map, **own}
        self._ends = [end for end in tokenizer.convert_ids_to_tokens(list(end_token_ids)) if end]
        self._leaves_open: bool | None = None
        self._next_ends: dict[tuple[str, bool], str] = {}

    def drafts(self, chat: Chat, loss_on: str) -> list[Draft]:
        """The conversation as one text, or as several in order if the template rewrites earlier turns.

        Raises RowProblem if the template refuses the messages, or does not write the prompt as the beginning of prompt
        and response.
        """
        turns = [n for n, message in enumerate(chat.messages) if n >= chat.first and message["role"] == "assistant"]
        if loss_on == "all":
            text = self._render(chat, len(chat.messages))
            return [self._draft(chat, text, [(0, len(text))], 0, turns[-1:])]
        pending = turns[-1:] if loss_on == "last" else turns
        written = {turn: self._turn(chat, turn) for turn in pending}
        drafts = []
        while pending:
            text, _ = written[pending[-1]]
            fits = [turn for turn in pending if text.startswith(written[turn][0])]
            spans = [span for turn in fits for span in written[turn][1]]
            drafts.append(self._draft(chat, text, spans, spans[0][0], fits))
            pending = [turn for turn in pending if turn not in fits]
        return drafts[::-1]

    def _draft(self, chat: Chat, text: str, spans: Sequence[Span], prompt_end: int, turns: Sequence[int]) -> Draft:
        answers = [chat.messages[turn] for turn in turns]
        counted = "".join(text[start:end] for start, end in spans)
        is_altered = any(answer["content"].strip() not in counted for answer in answers)
        unwritten = unwritten_fields(answers, counted, chat.tools or (), text)
        is_open = self._is_open(chat)
        ending = self._next_end(chat, turns[-1]) if is_open and turns else ""
        shown = num_images(chat.messages[: turns[-1] + 1])
        return Draft(text, tuple(spans), prompt_end, False, is_open, is_altered, unwritten, ending, shown)

    def _is_open(self, chat: Chat) -> bool:
        """Whether the template writes nothing after a last response; the first conversation decides it for all."""
        if self._leaves_open is None:
            last = {"role": chat.messages[-1]["role"], "content": PROBE}
            text = self._render(Chat([*chat.messages[:-1], last], chat.first, chat.tools), len(chat.messages))
            self._leaves_open = text.rstrip().endswith(PROBE)
        return self._leaves_open

    def _next_end(self, chat: Chat, turn: int) -> str:
        """The token that ends a turn because the next message begins with it; "" where no such token ends responses."""
        following = chat.messages[turn + 1 : turn + 2]
        guessed = "tool" if chat.messages[turn].get("tool_calls") else "user"
        key = (following[0]["role"] if following else guessed, bool(chat.tools))
        if key not in self._next_ends:
            self._next_ends[key] = self._end_before(key[0], chat, turn)
        return self._next_ends[key]

    def _end_before(self, role: str, chat: Chat, turn: int) -> str:
        """The end token that the template writes between a response in the place of a turn and a message of a role."""
        answer: Message = {"role": "assistant", "content": ANSWER}
        if role == "tool":
            answer |= {"content": "", "tool_calls": [call(VALUE)]}
        message = {"role": role, "content": PROBE, **({"name": TOOL} if role == "tool" else {})}
        try:
            text = self._render(Chat([*chat.messages[:turn], answer, message], 0, chat.tools), turn + 2)
        except RowProblem:
            return ""
        said = VALUE if role == "tool" else ANSWER
        between = text.rpartition(said)[2].partition(PROBE)[0]
        found = [(place, end) for end in self._ends if (place := between.find(end)) >= 0]
        return min(found)[1] if found else ""

    def _turn(self, chat: Chat, turn: int) -> tuple[str, list[Span]]:
        """The text up to the end of a turn, and the spans of that turn that count."""
        if MARKS.search(self._template(chat)):
            return self._marked_turn(chat, turn)
        before, text = self._render(chat, turn, generation_prompt=True), self._render(chat, turn + 1)
        if not text.startswith(before):
            place = next((n for n, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(text))
            found = f"the prompt ends in {before[max(place - 10, 0) :][:40]!r}, its response has "
            found += f"{text[max(place - 10, 0) :][:40]!r} there"
            raise RowProblem("template_rewrites", f"messages[{turn}]", found)
        return text, [(len(before), len(text))]

    def _marked_turn(self, chat: Chat, turn: int) -> tuple[str, list[Span]]:
        """The spans of a turn are those that the conversation before it does not have. Some templates close every text,
        so the text of the conversation before it need not be the beginning of the text with the turn.
        """
        (text,), (marks,) = self._call(chat, turn + 1, return_assistant_tokens_mask=True)
        _, (earlier,) = self._call(chat, turn, return_assistant_tokens_mask=True)
        own = [(start, end) for start, end in marks[len(earlier) :] if start < end]
        counted = "".join(text[start:end] for start, end in own)
        said = chat.messages[turn]["content"].split("</think>")[-1].strip()
        if not own or (said in text and said not in counted):
            raise RowProblem("template_rewrites", f"messages[{turn}]", "no {% generation %} mark around this turn")
        return text, own

    def _template(self, chat: Chat) -> str:
        return self._templates[bool(chat.tools)]

    def _render(self, chat: Chat, num_messages: int, generation_prompt: bool = False) -> str:
        texts, _ = self._call(chat, num_messages, add_generation_prompt=generation_prompt)
        text: str = texts[0]
        return text

    def _call(self, chat: Chat, num_messages: int, **options: bool) -> tuple[list[str], list[list[Span]]]:
        messages: list[Message] = chat.messages[:num_messages]
        variables = self._variables | options | ({"tools": chat.tools} if chat.tools else {})
        template = self._template(chat)

        def render() -> tuple[list[str], list[list[Span]]]:
            known = adapted(template, variables, messages)
            found: tuple[list[str], list[list[Span]]] = render_jinja_template(
                conversations=[known], chat_template=template, **variables
            )
            return found

        try:
            texts, spans = refusable(render)
            checked_length(texts[0])
        except TemplateRefusal as refusal:
            raise RowProblem("template_refuses", "", str(refusal)) from None
        return texts, spans
