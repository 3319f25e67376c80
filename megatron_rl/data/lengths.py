"""Which tokenised rows a model can take, and what becomes of those that are longer than may be. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_rl.data.reading_options import ReadingOptions
from megatron_rl.data.row_problems import RowProblem
from megatron_rl.data.tokens import Tokens


def fitted(answers: Sequence[Tokens], options: ReadingOptions, shares_prompt: bool) -> tuple[list[Tokens], int, int]:
    """(what is left, how many were cut, how many were dropped) of the texts of one row.

    shares_prompt: the texts are answers to one prompt, which loses the same tokens in all of them, and of which none
    can be dropped alone. Raises RowProblem for a token that the model does not have, for a text that is too long and
    may not be cut, and where no token is left that counts.
    """
    largest = max((token for one in answers for token in one.ids), default=0)
    if options.vocab_size is not None and largest >= options.vocab_size:
        raise RowProblem("unknown_token", "", f"token {largest}, and the model has {options.vocab_size}")
    limit = options.max_length
    excess = [max(len(one.ids) - limit, 0) for one in answers]
    if not any(excess):
        return _with_counts(answers), 0, 0
    if options.truncation == "error":
        longest = max(len(one.ids) for one in answers)
        raise RowProblem("too_long", "", f"{longest} tokens, and data.max_length={limit}")
    if options.truncation == "drop":
        left = [] if shares_prompt else [one for one, more in zip(answers, excess, strict=True) if not more]
        return _with_counts(left), 0, len(answers) - len(left)
    if options.truncation == "left":
        if shares_prompt:
            excess = [max(excess)] * len(answers)
            if excess[0] >= answers[0].prompt_length:
                found = f"{max(len(one.ids) - one.prompt_length for one in answers)} tokens in an answer alone"
                raise RowProblem("too_long", "", f"{found}, and data.max_length={limit}")
        cut = [_without_start(one, more) for one, more in zip(answers, excess, strict=True)]
    else:
        cut = [_without_end(one, more) for one, more in zip(answers, excess, strict=True)]
    return _with_counts(cut), sum(more > 0 for more in excess), 0


def _without_start(one: Tokens, num: int) -> Tokens:
    counts = one.counts[num:]
    if num:
        counts[0] = False  # nothing stands before it any more
    return replace(one, ids=one.ids[num:], counts=counts, prompt_length=max(one.prompt_length - num, 0))


def _without_end(one: Tokens, num: int) -> Tokens:
    length = len(one.ids) - num
    return replace(one, ids=one.ids[:length], counts=one.counts[:length], prompt_length=min(one.prompt_length, length))


def _with_counts(answers: Sequence[Tokens]) -> list[Tokens]:
    for one in answers:
        if not any(one.counts):
            found = f"none of {len(one.ids)} tokens, after a prompt of {one.prompt_length}"
            raise RowProblem("nothing_counted", "", found)
    return list(answers)
