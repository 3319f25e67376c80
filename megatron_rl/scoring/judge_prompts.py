"""What a judge reads: the template with its places filled, as tokens.

The chat template is rendered once, with marks in the places, and never reads a response. What goes into a place is
tokenised apart, as text: a control token that it spells, or a mark of the template, is letters to the judge.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from megatron_rl.config.judge_keys import PLACE, PLACES, places_of
from megatron_rl.data.template_process import Renderer, TemplateRefusal
from megatron_rl.errors import ConfigError

EDGE = "\ue000"
"""Begins and ends the mark of a place in the rendered template; Unicode gives it no meaning."""
LEAST_ROOM = 8
"""Tokens that must be left for what goes into the places."""


class Question(NamedTuple):
    """What a judge reads. is_cut: the middle of a text that it judges is left out."""

    token_ids: tuple[int, ...]
    is_cut: bool


class JudgePrompts:
    """Fills the places of one judge's prompt. key: the group of its keys, for messages. own: the judge's tokenizer."""

    def __init__(self, key: str, prompt: str, own: PreTrainedTokenizerBase, max_length: int) -> None:
        """Raises ConfigError where the chat template refuses the prompt or changes its places, and where the prompt
        leaves no room for a response.
        """
        self._own, self._max_length = own, max_length
        text = self._rendered(key, prompt)
        parts = re.split(f"{EDGE}({'|'.join(PLACES)}){EDGE}", text)
        if parts[1::2] != places_of(prompt):
            raise ConfigError(f"the chat_template of the judge of {key} drops or repeats places of {key}.prompt")
        self._names = parts[1::2]
        self._texts = [self._with_special_tokens(part) for part in parts[::2]]
        if own.chat_template is None:
            self._texts[0] = [*special_tokens_before(own), *self._texts[0]]
        self._frame = sum(map(len, self._texts))
        if self._frame + LEAST_ROOM > max_length:
            limit = f"{key}.max_prompt_length={max_length}"
            raise ConfigError(
                f"{limit} is too small: {key}.prompt alone has {self._frame} tokens; "
                f"try: {key}.max_prompt_length={2 * self._frame + 512}"
            )

    def fill(self, cases: Sequence[Mapping[str, str]]) -> list[Question]:
        """Return the tokens of questions. cases: place -> text, of each question."""
        different = list(dict.fromkeys(case[name] for case in cases for name in self._names))
        ids = dict(zip(different, self._as_text(different), strict=True))
        return [self._joined([ids[case[name]] for name in self._names]) for case in cases]

    def _joined(self, fields: list[list[int]]) -> Question:
        kept = within([len(ids) for ids in fields], self._max_length - self._frame)
        tokens = list(self._texts[0])
        for ids, length, text in zip(fields, kept, self._texts[1:], strict=True):
            first = -(-length // 2)
            tokens += ids if length == len(ids) else [*ids[:first], *ids[len(ids) - (length - first) :]]
            tokens += text
        return Question(tuple(tokens), sum(kept) < sum(map(len, fields)))

    def _rendered(self, key: str, prompt: str) -> str:
        marked = PLACE.sub(lambda place: f"{EDGE}{place[1]}{EDGE}", prompt)
        if self._own.chat_template is None:
            return marked
        template = Renderer(self._own, {"add_generation_prompt": True})
        try:
            return template.texts([[{"role": "user", "content": marked}]])[0]
        except TemplateRefusal as refusal:
            raise ConfigError(f"the chat_template of the judge refuses {key}.prompt: {refusal}") from None
        finally:
            template.close()

    def _with_special_tokens(self, text: str) -> list[int]:
        ids: list[int] = self._own(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []
        return ids

    def _as_text(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts, none of which is a special one."""
        if not texts:
            return []
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        special = set(self._own.all_special_ids)
        encoded: list[list[int]] = self._own(list(texts), **options)["input_ids"]
        return [[token for token in ids if token not in special] for ids in encoded]


def within(lengths: Sequence[int], room: int) -> list[int]:
    """Return lengths that take at most `room` together: the longest ones are reduced to one length."""
    left, kept = room, dict.fromkeys(range(len(lengths)), 0)
    for done, place in enumerate(sorted(kept, key=lambda place: lengths[place])):
        kept[place] = min(lengths[place], left // (len(lengths) - done))
        left -= kept[place]
    return [kept[place] for place in range(len(lengths))]


def special_tokens_before(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special tokens that a tokenizer writes before a text."""
    special, ids = set(tokenizer.all_special_ids), tokenizer("0", verbose=False)["input_ids"]
    place = next((n for n, token in enumerate(ids) if token not in special), 0)
    before: list[int] = ids[:place]
    return before
