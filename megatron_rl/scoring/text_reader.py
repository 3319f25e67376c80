"""Prepare conversations for a reward model with a tokenizer of its own: render them as text and tokenise that text.

The rule is verl's. The response is decoded without the special tokens at its end and appended to the prompt's messages
as the assistant's message. The reward model's chat template renders the messages, and its tokenizer tokenises the text.
Conversations longer than the reward model may read lose their end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.data.template_process import Renderer, TemplateRefusal
from megatron_rl.errors import ConfigError, RewardError
from megatron_rl.records import Batch, Conversation, prompts_of, ragged, single_turn

ROWS_AT_ONCE = 4096
"""Prompts checked in one call of the tokenizer."""


@dataclass(frozen=True)
class ReadText:
    """B token rows that a reward model reads; no token is sampled. is_cut: bool [B], True where the end is left out."""

    batch: Batch
    is_cut: torch.Tensor


@dataclass(frozen=True)
class TextReader:
    """Turns B prompts and responses into the token rows that one reward model reads.

    name: of the reward model, for messages. policy: the tokenizer of prompts and responses. own: the reward model's
    tokenizer; its template is rendered in a process that ends with this object. max_length: the most tokens that the
    model reads. length_key: the configuration key of max_length. ends: tokens that end a response, of a model that was
    trained at such a token; (): the model is asked at the last token of the text.
    """

    name: str
    policy: PreTrainedTokenizerBase
    own: PreTrainedTokenizerBase
    max_length: int
    length_key: str
    ends: tuple[int, ...] = ()
    _template: Renderer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_template", Renderer(self.own, {"add_generation_prompt": False}))

    def read(self, rows: Batch) -> ReadText:
        """Read rows with `raw_prompt`. Raises RewardError where the chat template refuses a conversation."""
        prompt_ids, response_ids = (
            [row.tolist() for row in column.unbind()] for column in (prompts_of(rows)["input_ids"], rows.sampled_ids)
        )
        whole = self.token_ids(rows.objects("raw_prompt"), prompt_ids, response_ids)
        texts = ragged([torch.tensor(ids[: self.max_length], dtype=torch.int64) for ids in whole])
        nothing = torch.zeros(len(whole), dtype=torch.int64)
        is_cut = torch.tensor([len(ids) > self.max_length for ids in whole])
        return ReadText(single_turn(texts, nothing), is_cut)

    def token_ids(
        self,
        conversations: Sequence[Conversation],
        prompt_ids: Sequence[list[int]],
        response_ids: Sequence[list[int]],
    ) -> list[list[int]]:
        """Return the reward model's tokens of each conversation with its response, uncut; at least one token.

        Messages go through its chat template, which has all special tokens in it. Where the prompt is text, or the
        tokenizer has no chat template, prompt and response are one text, to which the tokenizer adds its special
        tokens.

        Raises RewardError where the chat template refuses a conversation, or where a conversation has no tokens.
        """
        answers = self._texts([without_end(ids, self.policy.all_special_ids) for ids in response_ids])
        tokens: list[list[int]] = [[] for _ in conversations]
        chats = [row for row, conversation in enumerate(conversations) if self._is_chat(conversation)]
        rendered = self._rendered(
            [[*conversations[row], {"role": "assistant", "content": answers[row]}] for row in chats]
        )
        self._fill(tokens, chats, rendered, add_special_tokens=False)
        texts = [row for row, conversation in enumerate(conversations) if not self._is_chat(conversation)]
        starts = [self._plain(conversations[row], prompt_ids[row]) for row in texts]
        joined = [start + answers[row] for start, row in zip(starts, texts, strict=True)]
        self._fill(tokens, texts, joined, add_special_tokens=True)
        empty = next((row for row, ids in enumerate(tokens) if not ids), None)
        if empty is not None:
            raise RewardError(
                f"{self.name} cannot score {conversations[empty]!r:.200}: its chat template makes 0 tokens of it"
            )
        return tokens

    def check(self, conversations: Sequence[Conversation], prompt_ids: Sequence[list[int]]) -> list[str]:
        """Read all prompts with empty responses, before any process is started; return notes for the user.

        Raises ConfigError where a prompt is refused, or where no prompt leaves room for a response.
        """
        lengths = []
        for first in range(0, len(conversations), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            some = prompt_ids[rows]
            try:
                lengths += [len(ids) for ids in self.token_ids(conversations[rows], some, [[] for _ in some])]
            except RewardError as error:
                raise ConfigError(f"{error}: change the prompt, or the chat_template of the reward model") from error
        return list(self._notes(conversations, lengths))

    def _notes(self, conversations: Sequence[Conversation], lengths: list[int]) -> Iterator[str]:
        limit, nearest = f"{self.length_key}={self.max_length}", f"{self.length_key}={2 * max(lengths, default=1)}"
        full = sum(length >= self.max_length for length in lengths)
        if lengths and full == len(lengths):
            raise ConfigError(
                f"{limit} is too small: {self.name} would read nothing of any response, as the shortest of "
                f"{len(lengths)} prompts has {min(lengths)} of its tokens; try: {nearest}"
            )
        if full:
            yield f"note: {full} of {len(lengths)} prompts leave no room for a response in {limit} of {self.name}"
        if self.own.chat_template is None and any(not isinstance(chat, str) for chat in conversations):
            yield f"note: the tokenizer of {self.name} has no chat_template, so it reads messages as plain text"

    def _is_chat(self, conversation: Conversation) -> bool:
        return not isinstance(conversation, str) and self.own.chat_template is not None

    def _plain(self, conversation: Conversation, prompt_ids: list[int]) -> str:
        """Return a prompt as text: the text of its file, or the decoded tokens of its messages."""
        if isinstance(conversation, str):
            return conversation
        return self._texts([prompt_ids], skip_special_tokens=True)[0]

    def _texts(self, rows: Sequence[list[int]], skip_special_tokens: bool = False) -> list[str]:
        texts: list[str] = self.policy.batch_decode(rows, skip_special_tokens=skip_special_tokens)
        return texts

    def _rendered(self, chats: Sequence[list[dict[str, object]]]) -> list[str]:
        if not chats:
            return []
        try:
            return self._template.texts(chats)
        except TemplateRefusal as refusal:
            messages = chats[refusal.number][:-1]
            raise RewardError(f"the chat_template of {self.name} refuses {messages!r:.200}: {refusal}") from None

    def _fill(self, tokens: list[list[int]], rows: Sequence[int], texts: list[str], add_special_tokens: bool) -> None:
        """Write the tokens of each text into its row."""
        if texts:
            encoded = self.own(texts, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
            for row, ids in zip(rows, encoded, strict=True):
                tokens[row] = self._ended(ids) if self.ends and ids else ids

    def _ended(self, ids: list[int]) -> list[int]:
        """Return a text up to its end token, without the blanks that a template writes behind it; a text that nothing
        ends gets the tokenizer's, as `data.tokens.Encoder` gives it to a text to train on.
        """
        last = max((place for place, token in enumerate(ids) if token in self.ends), default=-1)
        if last >= 0 and not self.own.decode(ids[last + 1 :]).strip():
            return ids[: last + 1]
        return ids if self.own.eos_token_id is None else [*ids, int(self.own.eos_token_id)]


def without_end(ids: Sequence[int], special: Sequence[int]) -> list[int]:
    """Return the tokens without special tokens at their end; other special tokens stay."""
    kept, known = list(ids), set(special)
    while kept and kept[-1] in known:
        kept.pop()
    return kept
