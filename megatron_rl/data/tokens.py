"""Text with marked characters as marked tokens, and the part of it that fits into `data.max_length`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from transformers import PreTrainedTokenizerBase

from megatron_rl.data.chat_template import Draft
from megatron_rl.data.reading_options import ReadingOptions
from megatron_rl.data.row_problems import RowProblem
from megatron_rl.errors import ConfigError
from megatron_rl.images import Pieces, parts_an_image, pieces_between


@dataclass(frozen=True)
class Tokens:
    """A text. counts: which of the ids are in the loss. prompt_length: tokens before the first response that counts.
    is_split: a response begins or ends inside a token of the whole text, so prompt and response were tokenised apart.
    images: whose placeholders are among the ids.
    """

    ids: list[int]
    counts: list[bool]
    prompt_length: int
    is_split: bool = False
    images: Pieces = ()

    def with_images(self, ids: list[int], images: Pieces) -> Tokens:
        """Return the text with all placeholders of its images, of which it has one each; none of them counts.

        ids: with all placeholders.
        """
        if not images:
            return self
        counts, before, first = list[bool](), 0, 0
        for piece in images:
            text = piece.first - before
            counts += [*self.counts[first : first + text], *[False] * piece.num_tokens]
            before, first = piece.stop, first + text + 1
        places = [piece.first - sum(other.num_tokens - 1 for other in images[:n]) for n, piece in enumerate(images)]
        in_prompt = (piece for piece, place in zip(images, places, strict=True) if place < self.prompt_length)
        longer = sum(piece.num_tokens - 1 for piece in in_prompt)
        counts += self.counts[first:]
        return replace(self, ids=ids, counts=counts, prompt_length=self.prompt_length + longer, images=images)


class Encoder:
    """Turns drafts into tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, append_eos: bool, end_token_ids: Sequence[int] = ()):
        """append_eos: whether a response that nothing ends gets the end token. end_token_ids: at which generation
        stops; (): at the tokenizer's alone.
        """
        self._tokenizer = tokenizer
        self._append_eos = append_eos
        self._ends = frozenset(end_token_ids or [tokenizer.eos_token_id])
        self._lead = _special_tokens_before(tokenizer)

    def encode(self, drafts: Sequence[Draft]) -> list[Tokens]:
        """Tokens of each text. A response's tokens begin where the tokens of its prompt alone end.

        The text is tokenised whole. If a token reaches over the edge of a response, prompt and response are tokenised
        apart, as they are in generation; if that would change the text (some tokenizers put a blank before every
        text), the token at the edge is the response's. Text that a template writes after the end token is no part of a
        response; a token with which the next message begins is, where generation stops at it.

        Raises ConfigError if an end token is to be appended and the tokenizer has none.
        """
        borders = [_borders(draft) for draft in drafts]
        whole = self._ids([draft.text for draft in drafts])
        pieces = [
            draft.text[start:end]
            for draft, places in zip(drafts, borders, strict=True)
            for start, end in zip(places, places[1:], strict=False)
        ]
        parts = iter(self._ids(pieces))
        encoded = []
        for draft, places, ids in zip(drafts, borders, whole, strict=True):
            own = [next(parts) for _ in places[1:]]
            encoded.append(self._encode(draft, places, ids, own))
        return encoded

    def _encode(self, draft: Draft, places: list[int], ids: list[int], parts: list[list[int]]) -> Tokens:
        ids, edges, is_split = self._placed(draft.text, places, ids, parts)
        at = dict(zip(places, edges, strict=True))
        counts = [False] * len(ids)
        for start, end in draft.spans:
            counts[at[start] : at[end]] = [True] * (at[end] - at[start])
        prompt_length = at[draft.prompt_end]
        if ids and not draft.is_plain:
            if draft.is_open:
                self._count_ends_of_next([at[end] for _, end in draft.spans], ids, counts)
            ids, counts = self._up_to_the_end_token(ids, counts, [at[end] for _, end in draft.spans])
        if draft.is_plain:
            ids, counts = [*self._lead, *ids], [False] * len(self._lead) + counts
            prompt_length += len(self._lead) if draft.prompt_end else 0
        if draft.is_open and self._append_eos and (not ids or ids[-1] not in self._ends):
            ids, counts = [*ids, self._end(draft)], [*counts, True]
        if counts:
            counts[0] = False
        return Tokens(ids, counts, prompt_length, is_split)

    def _placed(
        self, text: str, places: list[int], ids: list[int], parts: list[list[int]]
    ) -> tuple[list[int], list[int], bool]:
        """(tokens of `text`, the number of tokens before each of `places`, whether one of these is inside a token)."""
        joined = [token for part in parts for token in part]
        if joined == ids:
            return list(ids), _running(parts), False
        edges = [self._edge(text[:place], ids) for place in places[:-1]]
        if all(is_whole for _, is_whole in edges):
            return list(ids), [*(edge for edge, _ in edges), len(ids)], False
        if self._text(joined) == self._text(ids):
            return joined, _running(parts), True
        return list(ids), [*(edge for edge, _ in edges), len(ids)], True

    def _count_ends_of_next(self, ends: Sequence[int], ids: list[int], counts: list[bool]) -> None:
        """Let a response that nothing ends have the token with which the next message begins, where generation stops at
        that token, as GLM-4.5's does at <|user|>.
        """
        for end in ends:
            if 0 < end < len(ids) and ids[end] in self._ends and ids[end - 1] not in self._ends:
                counts[end] = True

    def _up_to_the_end_token(
        self, ids: list[int], counts: list[bool], ends: Sequence[int]
    ) -> tuple[list[int], list[bool]]:
        """Take out the blanks that a template writes after a response's end token, where generation stops. They do not
        count, and at the end of the text they are cut off, so that a reward model sees what generation gives it.
        """
        for end in ends:
            last = end - 1
            while last > 0 and counts[last] and ids[last] not in self._ends:
                last -= 1
            if counts[last] and ids[last] in self._ends and not self._text(ids[last + 1 : end]).strip():
                counts[last + 1 : end] = [False] * (end - last - 1)
        last = max((place for place, token in enumerate(ids) if token in self._ends), default=len(ids) - 1)
        if counts[last] and not any(counts[last + 1 :]) and not self._text(ids[last + 1 :]).strip():
            ids, counts = ids[: last + 1], counts[: last + 1]
        return ids, counts

    def _edge(self, before: str, ids: list[int]) -> tuple[int, bool]:
        """(how many of `ids` are tokens of the text `before`, whether these are all its tokens)."""
        own = self._ids([before])[0]
        same = next((n for n, (a, b) in enumerate(zip(own, ids, strict=False)) if a != b), min(len(own), len(ids)))
        return same, same == len(own)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        different = list(dict.fromkeys(texts))  # prompts of several responses, and what templates write between turns
        encoded = self._tokenizer(
            different,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        known: dict[str, list[int]] = dict(zip(different, encoded["input_ids"], strict=True))
        return [known[text] for text in texts]

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text

    def _end(self, draft: Draft) -> int:
        """The token that is appended to the last response of a draft, which nothing ends."""
        if draft.ending:
            return int(self._tokenizer.convert_tokens_to_ids(draft.ending))
        token = self._tokenizer.eos_token_id
        if token is None:
            raise ConfigError(
                "the tokenizer has no eos_token to end responses with: add one to the model folder, or set "
                "data.append_eos=false"
            )
        return int(token)


def fitted(answers: Sequence[Tokens], options: ReadingOptions, shares_prompt: bool) -> tuple[list[Tokens], int, int]:
    """(the texts of one row within `max_length`, how many were cut, how many were dropped).

    shares_prompt: the texts are responses to one prompt: all lose the same tokens of it, and none is dropped alone.

    Raises RowProblem for a token that the model does not have, for a text that is too long and may not be cut, and if
    no token is left that counts.
    """
    largest = max((token for answer in answers for token in answer.ids), default=0)
    if options.vocab_size is not None and largest >= options.vocab_size:
        raise RowProblem("unknown_token", "", f"token {largest}, and the model has {options.vocab_size}")
    limit = options.max_length
    excess = [max(len(answer.ids) - limit, 0) for answer in answers]
    if not any(excess):
        return _with_counts(answers), 0, 0
    if options.truncation == "error":
        longest = max(len(answer.ids) for answer in answers)
        raise RowProblem("too_long", "", f"{longest} tokens, and data.max_length={limit}")
    if options.truncation == "drop":
        left = [] if shares_prompt else [answer for answer, more in zip(answers, excess, strict=True) if not more]
        return _with_counts(left), 0, len(answers) - len(left)
    if options.truncation == "left":
        if shares_prompt:
            excess = [_whole_start(answers[0].images, max(excess))] * len(answers)
            if excess[0] >= answers[0].prompt_length:
                longest = max(len(answer.ids) - answer.prompt_length for answer in answers)
                raise RowProblem("too_long", "", f"{longest} tokens in a response alone, and data.max_length={limit}")
        cut = [_without_start(answer, more) for answer, more in zip(answers, excess, strict=True)]
    else:
        cut = [_without_end(answer, more) for answer, more in zip(answers, excess, strict=True)]
    return _with_counts(cut), sum(more > 0 for more in excess), 0


def _without_start(text: Tokens, num: int) -> Tokens:
    num = _whole_start(text.images, num)
    counts = text.counts[num:]
    if num:
        counts[0] = False  # no token precedes it
    images = pieces_between(text.images, num, len(text.ids))
    prompt_length = max(text.prompt_length - num, 0)
    return replace(text, ids=text.ids[num:], counts=counts, prompt_length=prompt_length, images=images)


def _whole_start(images: Pieces, num: int) -> int:
    """How many tokens go where `num` must: an image that would lose some is left out as a whole."""
    return next((piece.stop for piece in images if parts_an_image([piece], num)), num)


def _without_end(text: Tokens, num: int) -> Tokens:
    length = len(text.ids) - num
    length = next((piece.first for piece in text.images if parts_an_image([piece], length)), length)
    prompt_length, images = min(text.prompt_length, length), pieces_between(text.images, 0, length)
    return replace(text, ids=text.ids[:length], counts=text.counts[:length], prompt_length=prompt_length, images=images)


def _with_counts(answers: Sequence[Tokens]) -> list[Tokens]:
    for text in answers:
        if not any(text.counts):
            found = f"none of {len(text.ids)} tokens, after a prompt of {text.prompt_length}"
            raise RowProblem("nothing_counted", "", found)
    return list(answers)


def _borders(draft: Draft) -> list[int]:
    """Places in the text at which a span or the prompt begins or ends, with both ends of the text."""
    inner = {place for span in draft.spans for place in span} | {draft.prompt_end}
    return sorted({0, len(draft.text)} | inner)


def _running(parts: Sequence[Sequence[int]]) -> list[int]:
    return [0, *accumulate(len(part) for part in parts)]


def _special_tokens_before(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that the tokenizer puts before a text, such as a begin token."""
    bare: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    full: list[int] = tokenizer("a")["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start]
    return []
